#!/usr/bin/env python3
"""Train a small BitNet b1.58 language model on the King James Bible, quantisation in the loop.

    apt-get install bible-kjv                       # public-domain text (bible-kjv-text)
    bible -f "Gen1:1-Rev22:21" > kjv.txt            # one verse a line: "Ge1:1 In the beginning ..."
    pip install torch numpy tokenizers safetensors
    python train_demo_model.py --text kjv.txt --out demo-model

Writes a checkpoint that Hugging Face `BitNetForCausalLM` loads as it is: config.json,
generation_config.json, model.safetensors (bf16 masters), tokenizer files, val.txt (held out). Every
projection is ternarised on the fly (absmean, one scale each), every input of one is rounded to int8
(absmax per token); gradients pass straight through. It must not know bitnet_ops.
"""

import argparse
import json
import math
import re
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

# The abbreviations of `bible -f`, in the order of the books.
BOOKS = dict(
    pair.split("=")
    for pair in (
        "Ge=Genesis Exo=Exodus Lev=Leviticus Num=Numbers Deu=Deuteronomy Josh=Joshua Jdgs=Judges "
        "Ruth=Ruth 1Sm=1_Samuel 2Sm=2_Samuel 1Ki=1_Kings 2Ki=2_Kings 1Chr=1_Chronicles "
        "2Chr=2_Chronicles Ezra=Ezra Neh=Nehemiah Est=Esther Job=Job Psa=Psalm Prv=Proverbs "
        "Eccl=Ecclesiastes SSol=Song_of_Solomon Isa=Isaiah Jer=Jeremiah Lam=Lamentations "
        "Eze=Ezekiel Dan=Daniel Hos=Hosea Joel=Joel Amos=Amos Obad=Obadiah Jonah=Jonah Mic=Micah "
        "Nahum=Nahum Hab=Habakkuk Zep=Zephaniah Hag=Haggai Zec=Zechariah Mal=Malachi Mat=Matthew "
        "Mark=Mark Luke=Luke John=John Acts=Acts Rom=Romans 1Cor=1_Corinthians "
        "2Cor=2_Corinthians Gal=Galatians Eph=Ephesians Phi=Philippians Col=Colossians "
        "1Th=1_Thessalonians 2Th=2_Thessalonians 1Tim=1_Timothy 2Tim=2_Timothy Titus=Titus "
        "Phmn=Philemon Heb=Hebrews Jas=James 1Pet=1_Peter 2Pet=2_Peter 1Jn=1_John 2Jn=2_John "
        "3Jn=3_John Jude=Jude Rev=Revelation"
    ).split()
)
# Held out: chapters without a close parallel elsewhere in the text.
VAL = (
    "Genesis 39|Exodus 17|Judges 14|Ruth 3|Nehemiah 6|Job 28|Psalm 46|Psalm 91|Psalm 139|"
    "Proverbs 15|Ecclesiastes 7|Isaiah 55|Jeremiah 18|Hosea 11|Jonah 2|John 2|James 3|Romans 12|"
    "1 Corinthians 13|Revelation 5"
).split("|")
BOS, EOS, CONTEXT = 0, 1, 1024
IDS = {"bos_token_id": BOS, "eos_token_id": EOS}
COMPUTE = torch.bfloat16  # of matrix products


# Text ----------------------------------------------------------------------------------------


def chapters(path):
    """The text as [(title, body)]: title "Genesis 1", body the title, then one verse a line."""
    out, last = [], None
    for line in Path(path).read_text().splitlines():
        book, chapter, _, verse = re.match(r"(\d?[A-Za-z]+)(\d+):(\d+) (.*)", line).groups()
        title = f"{BOOKS[book].replace('_', ' ')} {chapter}"
        if title != last:
            out.append((title, []))
            last = title
        out[-1][1].append(re.sub(r" +", " ", verse).strip())
    return [(title, f"{title}\n" + "\n".join(verses)) for title, verses in out]


def train_tokenizer(texts, vocab_size):
    """A byte-level BPE that puts <s> first."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<s>", "</s>"],
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tok.train_from_iterator(texts, trainer)
    tok.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", BOS)]
    )
    return tok


class Stream:
    """Chapters in a new random order each epoch, as one endless row of ids."""

    def __init__(self, docs, rng):
        self.docs, self.rng = docs, rng
        self.ids, self.at = self._shuffled(), 0

    def _shuffled(self):
        return np.concatenate([self.docs[i] for i in self.rng.permutation(len(self.docs))])

    def take(self, batch, length):
        """(inputs, targets), each int64 [batch, length]."""
        need = batch * length
        if self.at + need + 1 > len(self.ids):
            self.ids, self.at = np.concatenate([self.ids[self.at :], self._shuffled()]), 0
        chunk = torch.from_numpy(self.ids[self.at : self.at + need + 1])
        self.at += need
        return chunk[:-1].view(batch, length), chunk[1:].view(batch, length)


# Model ---------------------------------------------------------------------------------------


class BitLinearFn(torch.autograd.Function):
    """y = int8(x) . ternary(w)^T * scales; exact in bf16, the gradient ignores the roundings."""

    @staticmethod
    def forward(ctx, x, w):
        x = x.float()
        a = x.abs().amax(-1, keepdim=True).clamp_min(1e-5) / 127
        xi = (x / a).round().to(COMPUTE)
        m = w.abs().mean().clamp_min(1e-5)
        wi = (w / m).round().clamp(-1, 1).to(COMPUTE)
        ctx.save_for_backward(xi, a, wi, m)
        return ((xi @ wi.t()).float() * (a * m)).to(COMPUTE)

    @staticmethod
    def backward(ctx, g):
        xi, a, wi, m = ctx.saved_tensors
        gx = (g.float() * m).to(COMPUTE) @ wi
        gw = (g.float() * a).to(COMPUTE).t() @ xi
        return gx, gw.float()


class BitLinear(nn.Module):
    def __init__(self, in_features, out_features):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features).normal_(0, 0.02))

    def forward(self, x):
        return BitLinearFn.apply(x, self.weight)


class RMSNorm(nn.Module):
    def __init__(self, n, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(n)), eps

    def forward(self, x):
        x = x.float()
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


def rotate(x, cos, sin):
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), -1)
    return (x.float() * cos + turned.float() * sin).to(COMPUTE)


class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.c, d, hidden = c, c["head_dim"], c["hidden_size"]
        self.q_proj = BitLinear(hidden, c["num_attention_heads"] * d)
        self.k_proj = BitLinear(hidden, c["num_key_value_heads"] * d)
        self.v_proj = BitLinear(hidden, c["num_key_value_heads"] * d)
        self.o_proj = BitLinear(c["num_attention_heads"] * d, hidden)
        self.attn_sub_norm = RMSNorm(hidden, c["rms_norm_eps"])

    def forward(self, x, shape, cos, sin):
        b, t = shape
        h, kv, d = (self.c[k] for k in ("num_attention_heads", "num_key_value_heads", "head_dim"))
        q = self.q_proj(x).view(b, t, h, d).transpose(1, 2)
        k = self.k_proj(x).view(b, t, kv, d).transpose(1, 2)
        v = self.v_proj(x).view(b, t, kv, d).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        k, v = k.repeat_interleave(h // kv, 1), v.repeat_interleave(h // kv, 1)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(self.attn_sub_norm(a.transpose(1, 2).reshape(b * t, h * d)))


class MLP(nn.Module):
    def __init__(self, c):
        super().__init__()
        hidden, inner = c["hidden_size"], c["intermediate_size"]
        self.gate_proj, self.up_proj = BitLinear(hidden, inner), BitLinear(hidden, inner)
        self.down_proj = BitLinear(inner, hidden)
        self.ffn_sub_norm = RMSNorm(inner, c["rms_norm_eps"])

    def forward(self, x):
        product = F.relu(self.gate_proj(x).float()).square() * self.up_proj(x).float()
        return self.down_proj(self.ffn_sub_norm(product))


class Layer(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.self_attn, self.mlp = Attention(c), MLP(c)
        self.input_layernorm = RMSNorm(c["hidden_size"], c["rms_norm_eps"])
        self.post_attention_layernorm = RMSNorm(c["hidden_size"], c["rms_norm_eps"])

    def forward(self, x, shape, cos, sin):
        x = x + self.self_attn(self.input_layernorm(x), shape, cos, sin).float()
        return x + self.mlp(self.post_attention_layernorm(x)).float()


class Body(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.embed_tokens = nn.Embedding(c["vocab_size"], c["hidden_size"])
        self.layers = nn.ModuleList(Layer(c) for _ in range(c["num_hidden_layers"]))
        self.norm = RMSNorm(c["hidden_size"], c["rms_norm_eps"])


class BitNet(nn.Module):
    """The whole model, tied head; forward gives the loss of every token in nats, [B, T]."""

    def __init__(self, c):
        super().__init__()
        self.model = Body(c)
        nn.init.normal_(self.model.embed_tokens.weight, 0, 0.02)
        d = c["head_dim"]
        freq = c["rope_theta"] ** (-torch.arange(0, d, 2).float() / d)
        angle = torch.arange(CONTEXT).float()[:, None] * torch.cat((freq, freq))
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(self, ids, targets):
        b, t = ids.shape
        x = self.model.embed_tokens(ids).view(b * t, -1)
        for layer in self.model.layers:
            x = layer(x, (b, t), self.cos[:t], self.sin[:t])
        logits = self.model.norm(x).to(COMPUTE) @ self.model.embed_tokens.weight.to(COMPUTE).t()
        return F.cross_entropy(logits.float(), targets.reshape(-1), reduction="none").view(b, t)


# Training ------------------------------------------------------------------------------------


@torch.no_grad()
def validate(model, docs):
    """Nats per token, and in all, over the held-out chapters, each read alone as <s> text </s>."""
    model.eval()
    total = count = 0
    for ids in docs:
        loss = model(torch.tensor([ids[:-1]]), torch.tensor([ids[1:]]))
        total, count = total + loss.sum().item(), count + loss.numel()
    model.train()
    return total / count, total


def make_optimizer(model, a):
    """AdamW; weight decay on the projections alone."""
    projections = [q for n, q in model.named_parameters() if q.dim() == 2 and "embed" not in n]
    chosen = set(map(id, projections))
    rest = [q for q in model.parameters() if id(q) not in chosen]
    groups = [
        {"params": projections, "weight_decay": a.wd},
        {"params": rest, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=a.lr, betas=(0.9, 0.95), fused=True)


def learning_rate(a, step, progress):
    """Warm-up over 100 steps, then a cosine to 2 % of the peak."""
    cosine = 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))
    return a.lr * min((step + 1) / 100, cosine)


def train(model, stream, val, a):
    """Train until --steps or --minutes; returns the number of steps."""
    optimizer = make_optimizer(model, a)
    step_model = torch.compile(model, dynamic=False) if a.compile else model
    start, step, progress = time.time(), -1, 0.0
    while progress < 1.0:
        step += 1
        progress = max((step + 1) / a.steps, (time.time() - start) / (60 * a.minutes))
        lr = learning_rate(a, step, progress)
        for group in optimizer.param_groups:
            group["lr"] = lr
        length = a.seq if progress < a.long_from else CONTEXT
        loss = step_model(*stream.take(a.batch_tokens // length, length)).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 100 == 99 or progress >= 1.0:
            full = step % 500 == 499 or progress >= 1.0
            held_out = f" val {validate(model, val)[0]:.4f}" if full else ""
            elapsed = time.time() - start
            print(f"step {step} lr {lr:.2e} loss {loss.item():.4f}{held_out} {elapsed:.0f}s")
    return step + 1


# Export --------------------------------------------------------------------------------------


def write_json(path, value):
    path.write_text(json.dumps(value, indent=2) + "\n")


def write_checkpoint(out, model, c):
    """config.json and model.safetensors; what is stored are the masters in bf16."""
    from safetensors.torch import save_file

    tensors = {n: q.data.bfloat16().contiguous() for n, q in model.named_parameters()}
    save_file(tensors, str(out / "model.safetensors"), metadata={"format": "pt"})
    quantization = {
        "quant_method": "bitnet",
        "linear_class": "autobitlinear",
        "quantization_mode": "online",
        "modules_to_not_convert": None,
    }
    head = {
        "architectures": ["BitNetForCausalLM"],
        "model_type": "bitnet",
        "torch_dtype": "bfloat16",
        **IDS,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
    }
    write_json(out / "config.json", {**head, **c, "quantization_config": quantization})


def write_text_files(out, tok):
    """The tokenizer, and how to generate."""
    tok.save(str(out / "tokenizer.json"))
    write_json(out / "generation_config.json", {**IDS, "do_sample": True, "temperature": 0.7})
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": CONTEXT,
        "bos_token": "<s>",
        "eos_token": "</s>",
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
        "chat_template": "{{ bos_token }}{% for m in messages %}{{ m['content'] }}"
        "{% if not loop.last %}{{ '\\n' }}{% endif %}{% endfor %}",
    }
    write_json(out / "tokenizer_config.json", tokenizer_config)


def arguments():
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--text", required=True)
    p.add_argument("--out", required=True, type=Path)
    p.add_argument("--vocab", type=int, default=4096)
    p.add_argument("--steps", type=int, default=5000)
    p.add_argument("--minutes", type=float, default=1e9, help="end the schedule by then")
    p.add_argument("--batch-tokens", type=int, default=2048)
    p.add_argument("--seq", type=int, default=256)
    p.add_argument(
        "--long-from", type=float, default=0.82, help="from this share of the steps: full length"
    )
    p.add_argument("--lr", type=float, default=2e-3)
    p.add_argument("--wd", type=float, default=0.1)
    p.add_argument("--seed", type=int, default=1611)
    p.add_argument("--compile", action="store_true")
    return p.parse_args()


def architecture(vocab_size):
    return {
        "vocab_size": vocab_size,
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "hidden_act": "relu2",
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
    }


def main():
    a = arguments()
    torch.manual_seed(a.seed)
    a.out.mkdir(parents=True, exist_ok=True)
    text = chapters(a.text)
    held = [body for title, body in text if title in VAL]
    rest = [body for title, body in text if title not in VAL]
    assert len(held) == len(VAL), "the text lacks some of the held-out chapters"
    (a.out / "val.txt").write_text("\n\n".join(held) + "\n")
    tok = train_tokenizer(rest, a.vocab)
    docs = [np.array([*tok.encode(b).ids, EOS], dtype=np.int64) for b in rest]
    val = [[*tok.encode(b).ids, EOS] for b in held]

    c = architecture(tok.get_vocab_size())
    model = BitNet(c)
    print(f"{sum(map(len, docs))} tokens, {sum(q.numel() for q in model.parameters())} parameters")
    steps = train(model, Stream(docs, np.random.default_rng(a.seed)), val, a)
    for q in model.parameters():  # what is measured is what is stored
        q.data = q.data.bfloat16().float()
    nats, total = validate(model, val)
    bits = total / math.log(2) / sum(len(b.encode()) for b in held)
    print(f"{steps} steps; held out: {nats:.5f} nats per token, {bits:.5f} bits per byte")
    write_checkpoint(a.out, model, c)
    write_text_files(a.out, tok)


if __name__ == "__main__":
    main()
