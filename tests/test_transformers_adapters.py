"""Every kind of adapter of PEFT, on the head of a patched model where it can be: the same loss, or one warning."""

import warnings
from copy import deepcopy
from typing import NamedTuple

from torch_aclnn_ops.integrations.transformers import patch_model

import peft
import pytest
import torch

from tests._language_models import CHUNK, LOGITS, Step, assert_close, make

ON_HEAD = {"target_modules": ["lm_head", "q_proj"]}
LATE = "its head was replaced or got adapters after patch_model"
UNCALLED = "was not called as a linear layer"


class Case(NamedTuple):
    """An adapter, what the warning says if the loss needs logits, also where the patch came first, and the model."""

    config: peft.PeftConfig
    warning: str = ""
    warning_after: str | None = None
    is_tied: bool = False
    family: str = "llama"


CASES = {
    "LoRA": Case(peft.LoraConfig(**ON_HEAD, r=4, lora_alpha=6), "", LATE),
    "LoRA, a softcap": Case(peft.LoraConfig(**ON_HEAD, r=4), "", LATE, family="gemma2"),
    "LoRA, a bias": Case(peft.LoraConfig(**ON_HEAD, r=4), "", LATE, family="phi"),
    "LoRA with dropout": Case(peft.LoraConfig(**ON_HEAD, r=4, lora_dropout=0.3), "", LATE),
    "LoRA, scaled by the rank's root": Case(peft.LoraConfig(**ON_HEAD, r=4, use_rslora=True), "", LATE),
    "LoRA on the head alone": Case(peft.LoraConfig(target_modules=["lm_head"], r=4), "", LATE),
    "LoRA elsewhere": Case(peft.LoraConfig(target_modules=["q_proj"], r=4)),
    "BOFT": Case(peft.BOFTConfig(**ON_HEAD, boft_block_size=4), "mul needs them"),
    "OFT": Case(peft.OFTConfig(**ON_HEAD, oft_block_size=4, r=0)),
    "LoHa": Case(peft.LoHaConfig(**ON_HEAD, r=4), "add needs them"),
    "LoKr": Case(peft.LoKrConfig(**ON_HEAD, r=4), "add needs them"),
    "VeRA": Case(peft.VeraConfig(target_modules=["lm_head"], r=4), "add needs them"),
    "AdaLoRA": Case(peft.AdaLoraConfig(**ON_HEAD, total_step=10), "add_ materializes the logits"),
    "DoRA": Case(peft.LoraConfig(**ON_HEAD, r=4, use_dora=True), "T needs them", LATE),
    "prompt tuning": Case(peft.PromptTuningConfig(num_virtual_tokens=4)),
    "prefix tuning": Case(peft.PrefixTuningConfig(num_virtual_tokens=4)),
    "the head saved": Case(peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"]), "", LATE),
    "trainable tokens": Case(peft.TrainableTokensConfig(token_indices=[3, 4])),
    "trainable tokens of a tied head": Case(peft.TrainableTokensConfig(token_indices=[3, 4]), UNCALLED, is_tied=True),
    "LoRA with trainable tokens of a tied head": Case(
        peft.LoraConfig(target_modules=["q_proj"], trainable_token_indices=[3, 4]), UNCALLED, is_tied=True
    ),
}


@pytest.fixture(autouse=True)
def _extensions_of_this_process(monkeypatch, tmp_path_factory):
    """BOFT tries to compile an extension; in torch's folder the lock of a killed process would stop it for ever."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path_factory.getbasetemp() / "extensions"))


def _patch(model):
    return patch_model(model, chunk_size=CHUNK)


def adapted(case, patch=lambda model: model):
    torch.manual_seed(5)
    config = deepcopy(case.config)
    config.task_type = "CAUSAL_LM"
    model = peft.get_peft_model(patch(make(case.family, tie_word_embeddings=case.is_tied)), config)
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:  # some start as zero
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model.train()


@pytest.mark.parametrize("is_patched_first", [False, True], ids=["adapted, patched", "patched, adapted"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_an_adapted_model_has_the_same_loss_without_logits_or_one_warning(case, is_patched_first):
    expected = Step(adapted(case))
    model = adapted(case, _patch) if is_patched_first else _patch(adapted(case))
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        steps = [Step(model), Step(model)]
    for step in steps:
        assert_close(step, expected)
    says = case.warning_after if is_patched_first and case.warning_after is not None else case.warning
    told = [str(one.message) for one in warned if "patch_model" in str(one.message)]
    assert len(told) == (1 if says else 0) and all(says in one for one in told)
    assert says or steps[0].largest < LOGITS
