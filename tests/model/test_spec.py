from __future__ import annotations

from importlib.resources import files

import pytest
import yaml
from transformers import LlamaConfig, LlamaForCausalLM

from bbquic.errors import ModelError
from bbquic.model.spec import build_config, families, load_class, parse_family, spec_for, spec_for_type
from bbquic.model.weights import tensors_for

LLAMA = (files("bbquic.model") / "families" / "llama.yaml").read_text("utf-8")


@pytest.mark.parametrize("spec", families(), ids=lambda spec: spec.model_types[0])
def test_every_class_of_a_family_is_in_this_transformers(spec: object) -> None:
    for field in spec.classes.__struct_fields__:  # type: ignore[attr-defined]
        assert isinstance(load_class(getattr(spec.classes, field)), type)  # type: ignore[attr-defined]


@pytest.mark.parametrize("tied", [False, True])
def test_the_tensors_of_all_blocks_are_those_of_the_whole_model(tied: bool) -> None:
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=50,
        tie_word_embeddings=tied,
    )
    ours = tensors_for(spec_for(config), config, range(3), embeds=True, heads=True)
    theirs = {name: tuple(tensor.shape) for name, tensor in LlamaForCausalLM(config).state_dict().items()}
    if tied:
        del theirs["lm_head.weight"]  # the same tensor as the embedding
    assert ours == theirs


def test_the_ends_and_middle_of_a_chain_share_out_the_tensors() -> None:
    config = LlamaConfig(num_hidden_layers=4, hidden_size=64, num_attention_heads=4, vocab_size=50)
    spec = spec_for(config)
    parts = [
        tensors_for(spec, config, range(1), embeds=True, heads=False),
        tensors_for(spec, config, range(1, 3), embeds=False, heads=False),
        tensors_for(spec, config, range(3, 4), embeds=False, heads=True),
    ]
    names = [name for part in parts for name in part]
    assert names == list(tensors_for(spec, config, range(4), embeds=True, heads=True))
    assert len(names) == len(set(names))


def test_blocks_that_the_model_lacks_are_refused() -> None:
    config = LlamaConfig(num_hidden_layers=4)
    with pytest.raises(ModelError, match="blocks 0 to 3"):
        tensors_for(spec_for(config), config, range(2, 5), embeds=False, heads=False)


@pytest.mark.parametrize("model_type", ["gpt2", None, ["llama"]])
def test_an_unknown_family_is_refused_and_the_known_are_listed(model_type: object) -> None:
    with pytest.raises(ModelError) as caught:
        spec_for_type(model_type)
    assert caught.value.hint is not None
    assert "llama" in caught.value.hint


@pytest.mark.parametrize(
    ("field", "value", "complaint"),
    [
        ("model_types", "llama", r"Expected `array`, got `str` - at `\$\.model_types`"),
        ("classes", {"config": "x"}, "classes"),
        ("weights", {"embed": 1, "block": "b.{block}.", "norm": "n", "head": "h"}, r"`\$\.weights\.embed`"),
        ("weights", {"embed": "e", "block": "b.", "norm": "n", "head": "h"}, "block is a prefix"),
        ("surprise", 1, "unknown field `surprise`"),
    ],
)
def test_a_wrong_field_of_a_description_is_named(field: str, value: object, complaint: str) -> None:
    described = yaml.safe_load(LLAMA) | {field: value}
    with pytest.raises(ModelError, match=complaint) as caught:
        parse_family(yaml.safe_dump(described), "odd.yaml")
    assert "odd.yaml" in str(caught.value)


def test_a_description_cannot_name_a_class_outside_of_transformers_models() -> None:
    described = yaml.safe_load(LLAMA)
    described["classes"]["norm"] = "os.path.join"
    with pytest.raises(ModelError, match="norm is the dotted path of a class"):
        parse_family(yaml.safe_dump(described), "odd.yaml")


def test_a_description_is_plain_yaml() -> None:
    with pytest.raises(ModelError, match=r"odd\.yaml"):
        parse_family("model_types: !!python/object/apply:os.getcwd []", "odd.yaml")


def test_a_class_that_transformers_lacks_is_named() -> None:
    with pytest.raises(ModelError, match="LlamaFutureLayer"):
        load_class("transformers.models.llama.modeling_llama.LlamaFutureLayer")


def test_a_config_that_its_class_refuses_is_a_model_error() -> None:
    with pytest.raises(ModelError, match="LlamaConfig"):
        build_config(spec_for_type("llama"), {"hidden_size": "wide"})
