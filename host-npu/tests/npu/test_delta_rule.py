"""The gated delta rule on the host NPU, against its recurrence in float64."""

import torch
import torch_npu
from tests._values import assert_near, called

_LENGTHS = (3, 4, 1)
_TOKENS, _KEY_HEADS, _HEADS, _KEYS, _VALUES = sum(_LENGTHS), 2, 4, 8, 6


def _inputs():
    query, key = (torch.randn(_TOKENS, _KEY_HEADS, _KEYS).bfloat16() * 0.3 for _ in range(2))
    value, beta = torch.randn(_TOKENS, _HEADS, _VALUES).bfloat16(), torch.rand(_TOKENS, _HEADS).bfloat16()
    return query, key, value, beta, -torch.rand(_TOKENS, _HEADS)


def _step(state, query, key, value, beta, decay):
    state = decay.exp()[:, None, None] * state
    known = torch.einsum("hvk,hk->hv", state, key)
    state = state + torch.einsum("hv,hk->hvk", (value - known) * beta[:, None], key)
    return state, torch.einsum("hvk,hk->hv", state, query)


def _wide(query, key, value, beta, decay):
    heads = [each.double().repeat_interleave(_HEADS // _KEY_HEADS, 1) for each in (query, key)]
    return [*heads, value.double(), beta.double(), decay.double()]


def test_each_sequence_starts_from_its_state_and_gives_the_last():
    query, key, value, beta, decay = _inputs()
    initial = torch.randn(len(_LENGTHS), _HEADS, _VALUES, _KEYS).bfloat16()
    options = {"beta": beta, "initial_state": initial, "actual_seq_lengths": torch.tensor(_LENGTHS).int(), "g": decay}
    result, final = called(torch_npu.npu_chunk_gated_delta_rule, query, key, value, scale=0.5, **options)
    expected, states = [], []
    parts = zip(*(each.split(_LENGTHS) for each in _wide(query, key, value, beta, decay)), strict=True)
    for state, tokens in zip(initial.double(), parts, strict=True):
        for token in zip(*tokens, strict=True):
            state, given = _step(state, *token)
            expected.append(given * 0.5)
        states.append(state)
    assert_near(result, torch.stack(expected))
    assert_near(final, torch.stack(states))


def test_each_token_keeps_its_state_and_a_sequence_goes_on_from_the_accepted_one():
    query, key, value, beta, decay = _inputs()
    states = torch.randn(_TOKENS + 2, _HEADS, _VALUES, _KEYS).bfloat16()
    places, accepted = torch.randperm(_TOKENS + 2)[:_TOKENS], [2, 1, 1]
    on_npu = states.npu()
    options = {"beta": beta, "actual_seq_lengths": torch.tensor(_LENGTHS).int(), "g": decay}
    options |= {"ssm_state_indices": places.int(), "num_accepted_tokens": torch.tensor(accepted).int()}
    result = called(torch_npu.npu_recurrent_gated_delta_rule, query, key, value, on_npu, scale=0.5, **options)
    wide, first = _wide(query, key, value, beta, decay), 0
    expected, after = [], states.double()
    for length, last in zip(_LENGTHS, accepted, strict=True):
        state = states[places[first + last - 1]].double()
        for token in range(first, first + length):
            state, given = _step(state, *[each[token] for each in wide])
            after[places[token]] = state
            expected.append(given * 0.5)
        first += length
    assert_near(result, torch.stack(expected))
    assert_near(on_npu, after)
