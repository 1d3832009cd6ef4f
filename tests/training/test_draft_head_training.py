"""Training of draft heads: what is computed, what is learned, what is written.

The oracle here is a plain float64 forward of one draft after another, with a list of keys; it
shares no code with the head that is trained, which runs all places of a text at once.
"""

import json
import math

import pytest
import torch
from safetensors.torch import load_file

from bitnet_ops.config import ModelConfig
from bitnet_ops.convert.errors import ConvertError
from bitnet_ops.nn.digits import from_digits, to_digits
from bitnet_ops.training import TrainingError
from bitnet_ops.training.draft_head import (
    DraftHeadWeights,
    Trunk,
    _noise_of,
    measure_acceptance,
    round_to_levels_ste,
    train_draft_head,
)
from draft_heads import head_shapes, strong_head, strong_norm
from hf_writer import FAMILIES, config_dict
from tiny_models import SMALL, config_of, random_ids, tiny_model

BITNET, LLAMA = SMALL["bitnet-offline"], SMALL["llama3-8b-like"]


def levels(weights, digits=3):
    return {
        name: from_digits(to_digits(w, None, digits), digits) if w.dim() == 2 else w
        for name, w in weights.items()
    }


def as_weights(config, seed=0, feed="after"):
    """A strong head as training returns one."""
    return DraftHeadWeights(
        levels(strong_head(config, seed)), config, config.intermediate_size, feed
    )


# What is computed ----------------------------------------------------------------------------


class PlainHead:
    """One pair after another, float64; keys and values of the pairs so far in lists."""

    def __init__(self, weights, config):
        self.w = {name[4:-7]: w.double() for name, w in weights.items()}
        self.c, self.keys, self.values = config, [], []

    def norm(self, x, name):
        if name not in self.w:
            return x
        return x / (x.square().mean(-1, keepdim=True) + self.c.rms_norm_eps).sqrt() * self.w[name]

    def times(self, x, name):
        groups = x.view(-1, 128 if len(x) % 128 == 0 else 64)
        step = groups.abs().amax(1, keepdim=True) / 127
        return self.w[name] @ (torch.round(groups / step) * step).flatten()

    def turned(self, heads, position):
        half = self.c.head_dim // 2
        found = heads.clone()
        for i in range(half):
            angle = position * self.c.rope_theta ** (-2 * i / self.c.head_dim)
            cos, sin = math.cos(angle), math.sin(angle)
            found[:, i] = heads[:, i] * cos - heads[:, i + half] * sin
            found[:, i + half] = heads[:, i + half] * cos + heads[:, i] * sin
        return found

    def pair(self, embedding, state, position):
        """(what the output head reads, what stands before the last norm)."""
        c, layer = self.c, "layers.0."
        halves = (
            self.norm(embedding, "pre_fc_norm_embedding"),
            self.norm(state, "pre_fc_norm_hidden"),
        )
        x = self.times(torch.cat(halves), "fc")
        h = self.norm(x, f"{layer}input_layernorm")
        q, k, v = (self.times(h, f"{layer}self_attn.{p}_proj").view(-1, c.head_dim) for p in "qkv")
        self.keys.append(self.turned(k, position))
        self.values.append(v)
        q, given = self.turned(q, position), []
        for head in range(c.num_attention_heads):
            of = head * c.num_key_value_heads // c.num_attention_heads
            scores = torch.stack([q[head] @ k[of] for k in self.keys]) / c.head_dim**0.5
            shares = torch.softmax(scores, 0)
            given.append(sum(s * v[of] for s, v in zip(shares, self.values, strict=True)))
        given = self.norm(torch.cat(given), f"{layer}self_attn.attn_sub_norm")
        x = x + self.times(given, f"{layer}self_attn.o_proj")
        h = self.norm(x, f"{layer}post_attention_layernorm")
        gate, up = (self.times(h, f"{layer}mlp.{p}_proj") for p in ("gate", "up"))
        gate = gate.relu() ** 2 if c.hidden_act == "relu2" else gate * gate.sigmoid()
        product = self.norm(gate * up, f"{layer}mlp.ffn_sub_norm")
        x = x + self.times(product, f"{layer}mlp.down_proj")
        return self.norm(x, "norm"), x


@pytest.mark.parametrize("family", [BITNET, LLAMA], ids=["bitnet", "llama"])
@pytest.mark.parametrize("feed", ["after", "before"])
def test_all_places_at_once_are_one_draft_after_another(family, feed):
    config = config_of(family)
    weights = as_weights(config, 3, feed)
    generator = torch.Generator().manual_seed(4)
    embeddings, states = (
        torch.randn(9, config.hidden_size, dtype=torch.float64, generator=generator)
        for _ in range(2)
    )
    head = weights.head().double()
    head.compute_on(torch.float64)
    with torch.no_grad():
        rows = head(embeddings[None], states[None], 3)
    assert [r.shape[1] for r in rows] == [8, 7, 6]
    for start in range(6):
        plain = PlainHead(weights.tensors, config)
        for i in range(start + 1):
            read, x = plain.pair(embeddings[i + 1], states[i], i + 1)
        for d in (1, 2, 3):
            # the head rounds activations in float32, as training does
            torch.testing.assert_close(rows[d - 1][0, start], read, rtol=1e-5, atol=1e-5)
            if d < 3:
                state, at = (read if feed == "after" else x), start + d + 1
                read, x = plain.pair(embeddings[at], state, at)


def test_levels_of_training_are_those_of_stored_digits():
    weight = torch.randn(6, 256, generator=torch.Generator().manual_seed(1))
    for digits in (1, 2, 3):
        rounded = round_to_levels_ste(weight, digits)
        kept = from_digits(to_digits(rounded, None, digits), digits)
        torch.testing.assert_close(kept, rounded, rtol=1e-6, atol=0)
    near = from_digits(to_digits(weight))
    torch.testing.assert_close(round_to_levels_ste(weight, 3), near, rtol=1e-6, atol=1e-7)


def test_the_gradient_passes_the_rounding_of_levels():
    weight = torch.randn(2, 64, requires_grad=True)
    (round_to_levels_ste(weight, 3) * 2).sum().backward()
    assert torch.equal(weight.grad, torch.full_like(weight, 2.0))


# What is learned -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained():
    model = tiny_model(BITNET)
    texts = [random_ids(seed, 96, below=24) for seed in range(6)]
    heads = []
    weights = train_draft_head(
        model, texts, steps=60, length=32, batch=4, rate=5e-3, intermediate_size=128,
        report=lambda step, losses, head: heads.append(step),
    )  # fmt: skip
    assert heads == list(range(1, 61))
    return model, texts, weights


def test_losses_of_every_depth_fall_to_what_the_model_leaves(trained):
    model, texts, weights = trained
    trunk = Trunk.of(model)
    logits = torch.cat([trunk.states(ids) for ids in texts]).double() @ trunk.head.double().T
    entropy = -(torch.softmax(logits, -1) * torch.log_softmax(logits, -1)).sum(-1).mean()
    before, after = (
        torch.tensor(part).mean(0) for part in (weights.losses[:5], weights.losses[-5:])
    )
    assert (after > float(entropy) - 0.1).all()  # cross entropy is at least that
    assert (after - entropy < 0.7 * (before - entropy)).all(), (before, after, entropy)


def test_trained_heads_have_the_names_and_shapes_of_files(trained):
    model, _, weights = trained
    shapes = {name: tuple(w.shape) for name, w in weights.tensors.items()}
    assert shapes == head_shapes(model.config, 128)
    for weight in weights.tensors.values():
        assert weight.dtype == torch.float32
        if weight.dim() == 2:
            torch.testing.assert_close(from_digits(to_digits(weight)), weight, rtol=1e-6, atol=0)


def test_a_trained_head_agrees_more_often_than_a_random_one(trained):
    model, texts, weights = trained
    found = measure_acceptance(model, weights, texts)
    random = measure_acceptance(model, as_weights(model.config), texts)
    assert found.places == random.places == 6 * (96 - 4)
    assert found.agreeing[0] > random.agreeing[0] + 0.1
    assert found.accepted[0] == pytest.approx(found.agreeing[0], abs=0.05)
    assert list(found.accepted) == sorted(found.accepted, reverse=True)
    assert found.tokens_a_step == 1 + sum(found.accepted)


def test_training_again_gives_the_same_weights():
    model, texts = tiny_model(LLAMA), [random_ids(1, 80)]
    state = torch.random.get_rng_state()
    first, again = (
        train_draft_head(model, texts, steps=3, length=32, batch=2, depth=2) for _ in range(2)
    )
    assert torch.equal(torch.random.get_rng_state(), state)
    for name, weight in first.tensors.items():
        assert torch.equal(weight, again.tensors[name]), name
    assert len(first.losses[0]) == 2


def test_training_goes_on_from_given_weights(trained):
    model, texts, weights = trained
    options = dict(length=32, batch=4, rate=1e-3)
    more = train_draft_head(model, texts, steps=3, start=weights.tensors, **options)
    assert more.intermediate_size == 128
    assert sum(more.losses[0]) < 0.5 * (sum(weights.losses[0]) + sum(weights.losses[-1]))
    other = {**weights.tensors, "mtp.norm.weight": torch.ones(7)}
    with pytest.raises(TrainingError, match=r"mtp.norm.weight \[256\] for this model, got \[7\]"):
        train_draft_head(model, texts, steps=1, start=other, **options)


# Draws ---------------------------------------------------------------------------------------


def test_noise_of_a_draw_makes_the_model_draw_it_and_is_gumbel():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4000, 12, dtype=torch.float64, generator=generator) * 2
    drawn = torch.multinomial(torch.softmax(logits, -1), 1, generator=generator)[:, 0]
    noise = _noise_of(logits, drawn, generator)
    assert torch.equal((logits + noise).argmax(-1), drawn)
    # Draws from softmax leave noise Gumbel-distributed: its mean, variance and tail.
    assert float(noise.mean()) == pytest.approx(0.5772, abs=0.02)
    assert float(noise.var()) == pytest.approx(math.pi**2 / 6, abs=0.05)
    assert float((noise > 2).double().mean()) == pytest.approx(
        1 - math.exp(-math.exp(-2)), abs=0.01
    )


# What is written -----------------------------------------------------------------------------


def test_saved_heads_read_back_at_their_levels(trained, tmp_path):
    _, _, weights = trained
    config = config_dict(BITNET)
    folder = weights.save(tmp_path / "head", config)
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    written = json.loads((folder / "config.json").read_text())
    assert ModelConfig.from_hf(written) == config_of(BITNET)
    stored = load_file(folder / "model.safetensors")
    assert {name: tuple(t.shape) for name, t in stored.items()} == head_shapes(
        config_of(BITNET), 128
    )
    for name, tensor in stored.items():
        ours = weights.tensors[name]
        assert tensor.dtype == (torch.bfloat16 if tensor.dim() == 2 else torch.float32)
        if tensor.dim() == 2:  # the same digits; the scale of a group to 8 bits
            a, b = to_digits(tensor), to_digits(ours)
            assert torch.equal(a.codes(), b.codes()), name
            torch.testing.assert_close(a.scale, b.scale, rtol=2**-8, atol=0)
        else:
            assert torch.equal(tensor, ours)


def test_a_head_is_saved_with_its_own_model_and_over_nothing(trained, tmp_path):
    _, _, weights = trained
    with pytest.raises(TrainingError, match="config.json of the model"):
        weights.save(tmp_path / "head", config_dict(LLAMA))
    assert not (tmp_path / "head").exists()
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "notes.txt").write_text("mine")
    with pytest.raises(ConvertError, match="there"):
        weights.save(tmp_path / "there", config_dict(BITNET))
    assert (tmp_path / "there" / "notes.txt").read_text() == "mine"


# Errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"depth": 4}, "depth from 1 to 3, got 4"),
        ({"depth": 0}, "depth from 1 to 3, got 0"),
        ({"length": 33}, "a text of 33 tokens or more, got none"),
    ],
    ids=["deep", "no depth", "short"],
)
def test_options_that_cannot_train_are_rejected(options, message):
    model = tiny_model(BITNET)
    with pytest.raises(TrainingError, match=message):
        train_draft_head(model, [random_ids(0, 32)], steps=1, **options)


def test_texts_without_room_for_drafts_are_rejected():
    model = tiny_model(BITNET)
    with pytest.raises(TrainingError, match="more than 4 tokens"):
        measure_acceptance(model, as_weights(model.config), [random_ids(0, 4)])


# Heads for tests of others ---------------------------------------------------------------------

PLACES = 24
MISTAKES = {
    "tap before the output norm": lambda run: run(states=lambda h, norm: h / norm),
    "halves of fc exchanged": lambda run: run(swap=True),
    "state with its own token": lambda run: run(token=0),
    "keys from the last token on": lambda run: run(forget=True),
    "a gap of positions": lambda run: run(gap=1),
    "positions that stand still": lambda run: run(stand=True),
    "norms with 1 added": lambda run: run(norms=lambda w: w + 1),
    "norms without the 1": lambda run: run(norms=lambda w: w - 1),
}


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("family", [BITNET, LLAMA], ids=["bitnet", "llama"])
def test_strong_heads_show_each_mistake(family, mistake):
    """Each changes the rows that the output head reads by a tenth and more."""
    config = config_of(family)
    generator = torch.Generator().manual_seed(8)
    embeddings, states = (
        torch.randn(PLACES, config.hidden_size, dtype=torch.float64, generator=generator)
        for _ in range(2)
    )
    last = strong_norm(config.hidden_size, generator).double()

    def run(swap=False, token=1, forget=False, gap=0, stand=False, norms=None,
            states=lambda h, norm: h):  # fmt: skip
        weights = levels(strong_head(config, 7))
        if norms is not None:
            weights = {n: norms(w) if w.dim() == 1 else w for n, w in weights.items()}
        if swap:
            weights["mtp.fc.weight"] = weights["mtp.fc.weight"].roll(config.hidden_size, 1)
        plain, behind = PlainHead(weights, config), states_behind * last
        for i in range(PLACES - 1):
            if forget and i == PLACES - 2:
                plain.keys, plain.values = [], []
            at = 1 if stand else i + 1 + (gap if i == PLACES - 2 else 0)
            read, _ = plain.pair(embeddings[i + token], states(behind[i], last), at)
        return read

    states_behind = states
    right, wrong = run(), MISTAKES[mistake](run)
    assert (wrong - right).norm() > 0.1 * right.norm(), float((wrong - right).norm() / right.norm())


def test_strong_heads_have_what_plain_training_lacks():
    weights = strong_head(config_of(FAMILIES["bitnet-offline"]), 5)
    for name, weight in weights.items():
        if weight.dim() == 1:
            assert weight.abs().max() > 3.5 and weight.abs().min() < 0.3 and (weight < 0).any(), (
                name
            )
    embedding, state = weights["mtp.fc.weight"].chunk(2, -1)
    assert state.std() > 1.8 * embedding.std()
    again = strong_head(config_of(FAMILIES["bitnet-offline"]), 6)
    assert not torch.equal(again["mtp.fc.weight"], weights["mtp.fc.weight"])
