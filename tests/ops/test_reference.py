"""The reference ops against answers from elsewhere: golden vectors and hand-made cases.

The reference is the oracle of other tests, so here nothing of the op library takes part.
"""

from __future__ import annotations

import pytest
import torch

from bounds import assert_equal
from golden import DOT_PRODUCT, I2S_A_HEX, golden_activations, golden_codes
from op_catalogue import reference
from op_values import pack_codes
from ops_attention import attention, kv_cache_update


def test_pack_gives_the_golden_bytes() -> None:
    packed = reference.pack(golden_codes().reshape(1, 256))
    assert bytes(packed.flatten().tolist()).hex() == I2S_A_HEX


def test_unpack_reads_the_golden_bytes() -> None:
    packed = torch.tensor(list(bytes.fromhex(I2S_A_HEX)), dtype=torch.uint8).reshape(1, 64)
    assert_equal(reference.unpack(packed, 256)[0], golden_codes())


def test_dot_product_of_the_golden_vector() -> None:
    packed = reference.pack(golden_codes().reshape(1, 256))
    assert reference.gemv(packed, golden_activations()).tolist() == [DOT_PRODUCT]


@pytest.mark.parametrize("k", [1, 31, 32, 33, 127, 128, 129, 300])
def test_pack_equals_the_bitwise_writer_of_the_samples(k: int, rng: torch.Generator) -> None:
    codes = torch.randint(-1, 2, (5, k), generator=rng, dtype=torch.int8)
    assert_equal(reference.pack(codes), pack_codes(codes))
    assert_equal(reference.unpack(pack_codes(codes), k), codes)


def test_unpack_rejects_code_3_and_wrong_padding() -> None:
    packed = torch.full((1, 32), 0x55, dtype=torch.uint8)
    packed[0, 0] = 0xD5  # code 3 at weight 0
    with pytest.raises(ValueError, match="code 3"):
        reference.unpack(packed, 128)
    packed[0, 0] = 0x54  # code 0 at weight 96, which is padding where K = 96
    with pytest.raises(ValueError, match="padding"):
        reference.unpack(packed, 96)
    assert reference.unpack(packed, 97)[0, 96] == -1


def test_activation_ties_go_to_even() -> None:
    q, scale = reference.quantize_activations(
        torch.tensor([127.0, 0.5, 1.5, 2.5, 126.5, -0.5, -1.5])
    )
    assert q.tolist() == [127, 0, 2, 2, 126, 0, -2]
    assert scale.item() == 1.0


def test_poisoned_row_is_zero_and_nan_and_alone() -> None:
    q, scale = reference.quantize_activations(
        torch.tensor([[1.0, 2.0], [torch.inf, 1.0], [1.0, torch.nan]])
    )
    assert q.tolist() == [[64, 127], [0, 0], [0, 0]]
    assert torch.isnan(scale).tolist() == [False, True, True]


def test_rms_norm_of_a_hand_made_row() -> None:
    # mean(x^2) = (9 + 16) / 2 = 12.5; with eps 12.5 the root is 5.
    y = reference.rms_norm(torch.tensor([3.0, 4.0]), torch.tensor([1.0, 10.0]), 12.5)
    assert y.tolist() == pytest.approx([0.6, 8.0], rel=1e-7)


def test_attention_sees_its_own_position_and_the_past_only() -> None:
    keys = torch.zeros(1, 1, 4, 2)
    values = torch.tensor([1.0, 3.0, 5.0, 1e9]).reshape(1, 1, 4, 1).expand(1, 1, 4, 2)
    out = attention(torch.ones(1, 2, 1, 2), keys, values, torch.tensor([1]), 1.0)
    assert out[0, :, 0, 0].tolist() == pytest.approx([2.0, 3.0], rel=1e-7)


def test_rope_rotates_half_split_pairs() -> None:
    quarter = torch.tensor([torch.pi / 2, 0.0])  # pair 0 by 90 degrees, pair 1 by none
    rotated = reference.rope(torch.tensor([[1.0, 2.0, 3.0, 4.0]]), torch.tensor(1), quarter)
    assert rotated[0].tolist() == pytest.approx([-3.0, 2.0, 1.0, 4.0], abs=1e-6)


def test_kv_cache_update_writes_only_its_positions() -> None:
    key_cache, value_cache = torch.zeros(1, 1, 4, 1), torch.zeros(1, 1, 4, 1)
    new = torch.tensor([7.0, 8.0]).reshape(1, 2, 1, 1)
    kv_cache_update(key_cache, value_cache, new, -new, torch.tensor([1]))
    assert key_cache.flatten().tolist() == [0, 7, 8, 0]
    assert value_cache.flatten().tolist() == [0, -7, -8, 0]
