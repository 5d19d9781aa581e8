"""What a reader of a config.json takes, and what it says of all else, key by key."""

import math
from typing import Any

import pytest

from kielo.models.config_keys import Key, NoWindows, Rope, RopeByKind, WholeHeads, Windows, read_config
from kielo.models.config_reader import LAYERS, NUMBER, SIZE, SWITCH, WHOLE, ConfigReader, Kind
from kielo.models.rope_scaling import normalise_rope
from kielo.recipe.errors import KieloError

LARGEST = 2**24
KINDS = "a list of 3 of full_attention or sliding_attention, one for each layer"
SIZE_IN_WORDS = "a whole number from 1 to 16,777,216"
THREE = ["full_attention", "sliding_attention", "full_attention"]


def said(reader: ConfigReader) -> str | None:
    """Return all complaints, None if there are none."""
    return "; ".join(dict.fromkeys(reader.complaints)) or None


@pytest.mark.parametrize(
    ("kind", "good", "bad", "expected"),
    [
        (SIZE, [1, 7, LARGEST], [0, -1, LARGEST + 1, 7.0, True, "7", [7]], SIZE_IN_WORDS),
        (LAYERS, [1, 10_000], [0, 10_001, 3.0, False], "a whole number from 1 to 10,000"),
        (WHOLE, [0, 1, 10**9], [-1, 2.0, True], "a whole number"),
        (NUMBER, [1e-9, 1, 0.5, 1e300], [0, 0.0, -1, math.inf, math.nan, True, "1"], "a number above 0"),
        (SWITCH, [True, False], [0, 1, "true"], "true or false"),
    ],
)
def test_a_value_of_another_kind_is_told_and_the_default_is_taken(
    kind: Kind, good: list[Any], bad: list[Any], expected: str
) -> None:
    """So that reading goes on; a key that is left out is the default without a complaint."""
    for value in good:
        reader = ConfigReader({"key": value})
        assert reader.value(("key",), kind, 77) is value and said(reader) is None
    for value in [*bad, None]:
        reader = ConfigReader({"key": value})
        assert reader.value(("key",), kind, 77) == 77
        given = "null" if value is None else repr(value)
        assert said(reader) == f"key = {given} does not fit: expected {expected}"
    reader = ConfigReader({"other": 3})
    assert reader.value(("key",), kind, 77) == 77 and said(reader) is None


def test_null_means_what_the_family_says() -> None:
    reader = ConfigReader({"a": None, "b": 5})
    assert reader.value(("a",), SIZE, 3, 9) == 9 and reader.value(("a",), NUMBER, 3, None) is None
    assert reader.value(("b",), SIZE, 3, 9) == 5 and reader.value(("c",), SIZE, 3, 9) == 3
    assert said(reader) is None and reader.keys_read == {"a", "b", "c"}


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (10**400, "1" + 56 * "0" + "..."),
        (10**5000, "a number of thousands of digits"),
        ("x" * 58, "'" + 58 * "x" + "'"),
        ("x" * 59, "'" + 56 * "x" + "..."),
    ],
    ids=["long", "longest", "60 characters", "61 characters"],
)
def test_a_damaged_value_is_shown_in_short(value: Any, shown: str) -> None:
    reader = ConfigReader({"key": value})
    reader.value(("key",), NUMBER, 1.0)
    assert said(reader) == f"key = {shown} does not fit: expected a number above 0"


def test_two_names_of_one_key_must_not_differ() -> None:
    """Null is no value beside another one; the first name is the one that is told."""
    reader = ConfigReader({"a": 3, "b": 4, "c": None, "d": 4, "e": None})
    assert reader.value(("a", "b"), SIZE, 1) == 3
    assert said(reader) == "a = 3 and b = 4 mean the same and differ"
    reader = ConfigReader({"a": 3, "b": 4, "c": None, "d": 4, "e": None})
    assert reader.value(("c", "b", "d"), SIZE, 1) == 4 == reader.value(("x", "b"), SIZE, 1)
    assert said(reader) is None
    assert reader.value(("c", "e"), SIZE, 2) == 2
    assert said(reader) == f"c = null does not fit: expected {SIZE_IN_WORDS}"


@pytest.mark.parametrize(
    ("config", "known", "found", "complaint"),
    [
        ({}, ("a", "b"), "a", None),
        ({"key": None}, ("a", "b"), "a", None),
        ({"key": "b"}, ("a", "b"), "b", None),
        ({"key": "c"}, ("a", "b"), "a", "key = 'c' (known: 'a', 'b')"),
        ({"key": 0}, (0.0,), 0, None),
        ({"key": 0}, (False,), False, "key = 0 (known: False)"),
        ({"key": False}, (0.0,), 0.0, "key = False (known: 0.0)"),
        ({"key": True}, (False,), False, "key = True (known: False)"),
        ({"key": ["x"]}, (["x"], ["y"]), ["x"], None),
    ],
)
def test_only_what_is_known_is_taken(
    config: dict[str, Any], known: tuple[Any, ...], found: Any, complaint: str | None
) -> None:
    """The first is that of a key that is left out; 0 is no false."""
    reader = ConfigReader(config)
    assert reader.only("key", known) == found
    assert said(reader) == (complaint and f"not supported: {complaint}")


@pytest.mark.parametrize(
    ("value", "found", "complaint"),
    [
        (THREE, tuple(THREE), None),
        (None, ("full_attention",) * 3, None),
        (THREE[:2], ("full_attention",) * 3, f"{THREE[:2]!r} does not fit: expected {KINDS}"),
        ([*THREE[:2], "mamba"], ("full_attention",) * 3,
         "['full_attention', 'sliding_attention', 'mamba'] does not fit: expected " + KINDS),
        ("abc", ("full_attention",) * 3, "'abc' does not fit: expected " + KINDS),
    ],
)  # fmt: skip
def test_layer_types_have_a_known_kind_for_each_layer(
    value: Any, found: tuple[str, ...], complaint: str | None
) -> None:
    reader = ConfigReader({"layer_types": value})
    assert reader.layer_types(["full_attention"] * 3) == found
    assert said(reader) == (complaint and f"layer_types = {complaint}")


def test_every_third_layer_has_no_window() -> None:
    """From the third on; a window of null is refused only if a layer has one."""
    kinds = ("sliding_attention", "sliding_attention", "full_attention") * 2
    five, three = {"num_hidden_layers": 5}, {"num_hidden_layers": 3}
    assert Windows(3).read(ConfigReader({}), five) == {"layer_types": kinds[:5], "sliding_window": 4096}
    given = {"sliding_window": 7, "layer_types": THREE}
    assert Windows(2).read(ConfigReader(given), three) == given | {"layer_types": tuple(THREE)}
    pattern = Windows(2, "pattern").read(ConfigReader({"pattern": 3}), five)
    assert pattern["layer_types"] == kinds[:5]
    reader = ConfigReader({"sliding_window": None})
    assert Windows(1).read(reader, three) == {"layer_types": ("full_attention",) * 3} and said(reader) is None
    Windows(3).read(reader, three)
    assert said(reader) == "layer_types has sliding_attention, but sliding_window is null"
    reader = ConfigReader({"sliding_window": 9, "layer_types": THREE})
    assert NoWindows().read(reader, three) == {}
    assert said(reader) == (
        "not supported: sliding_window = 9 (known: None); layer_types has "
        "sliding_attention, which models of this type do not have"
    )


def test_the_width_of_a_head_is_rounded_down_and_told() -> None:
    reader = ConfigReader({"num_key_value_heads": 1})
    for hidden, width in ((20, 5), (23, 5), (3, 1)):
        found = WholeHeads().read(reader, {"hidden_size": hidden, "num_attention_heads": 4})
        assert found == {"num_key_value_heads": 4, "head_dim": width}
    assert said(reader) == (
        "hidden_size 23 is no multiple of the 4 attention heads; hidden_size 3 is no multiple of the "
        "4 attention heads"
    )
    reader = ConfigReader({"head_dim": 6})
    WholeHeads().read(reader, {"hidden_size": 20, "num_attention_heads": 4})
    assert said(reader) == "not supported: head_dim = 6 (known: 5)"


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        ({"quantization_config": {"bits": 4}},
         "quantization_config (weights must be bf16, fp16 or fp32)"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder = True (known: False)"),
        ({"add_cross_attention": True}, "add_cross_attention = True (known: False)"),
        ({"pruned_heads": {"0": [1]}}, "pruned_heads = {'0': [1]} (known: {})"),
    ],
)  # fmt: skip
def test_what_no_family_does_is_refused_with_all_else(config: dict[str, Any], complaint: str) -> None:
    layers = Key("num_hidden_layers", kind=LAYERS, default=3)
    with pytest.raises(KieloError) as caught:
        read_config((layers, NoWindows()), config | {"sliding_window": 9}, "llama", "c.json")
    said = str(caught.value)
    assert said.startswith("c.json: not supported: ")
    assert complaint in said and "sliding_window = 9 (known: None)" in said


LINEAR = {"rope_type": "linear", "factor": 2.0}


POSITIONS = {"max_position_embeddings": 16}


def test_one_rope_is_read_from_either_place() -> None:
    """transformers 4's dict goes before 5's; an empty one is none."""
    for config, found in (
        ({}, (10_000.0, None)),
        ({"rope_theta": 7}, (7.0, None)),
        ({"rope_theta": 7, "rope_scaling": LINEAR}, (7.0, LINEAR)),
        ({"rope_theta": 7, "rope_parameters": LINEAR | {"rope_theta": 9}}, (9.0, LINEAR)),
        ({"rope_scaling": {}, "rope_parameters": LINEAR}, (10_000.0, LINEAR)),
        ({"rope_scaling": LINEAR, "rope_parameters": {"rope_theta": 9}}, (10_000.0, LINEAR)),
        ({"partial_rotary_factor": 1.0}, (10_000.0, None)),
    ):
        reader = ConfigReader(config)
        read = Rope().read(reader, POSITIONS)
        assert tuple(read.values()) == found and said(reader) is None
    reader = ConfigReader({"partial_rotary_factor": 0.5, "rope_theta": -1})
    Rope().read(reader, POSITIONS)
    assert said(reader) == (
        "rope_theta = -1 does not fit: expected a number above 0; not supported: "
        "partial_rotary_factor = 0.5 (known: 1.0)"
    )


def ropes(config: dict[str, Any], default: float | None = 3e5, windowed: float | None = 2e3) -> Any:
    reader = ConfigReader(config)
    found = RopeByKind(("theta", default), ("local_theta", windowed)).read(reader, POSITIONS)
    return said(reader) or tuple(found.values())


PLAIN = {"rope_type": "default", "rope_theta": 5.0}


def test_two_ropes_are_read_in_both_spellings() -> None:
    assert ropes({}) == (3e5, None, 2e3)
    assert ropes({"theta": 11, "local_theta": 12, "rope_scaling": LINEAR}) == (11.0, LINEAR, 12.0)
    both = {"full_attention": LINEAR | {"rope_theta": 9}, "sliding_attention": PLAIN}
    assert ropes({"theta": 11, "rope_parameters": both}) == (9.0, LINEAR, 5.0)
    for config, default, windowed in (({"local_theta": 7.0}, None, 2e3), ({"theta": 7.0}, 3e5, None)):
        lacking = "lacks theta, for which versions of transformers take different values"
        assert ropes(config, default, windowed) == lacking
    assert ropes({"theta": 7.0, "local_theta": 8.0}, None, None) == (7.0, None, 8.0)


@pytest.mark.parametrize(
    ("rope_parameters", "complaint"),
    [
        (LINEAR, "lacks full_attention.rope_theta, sliding_attention.rope_theta"),
        ([3], "lacks full_attention.rope_theta, sliding_attention.rope_theta"),
        ({"full_attention": PLAIN}, "lacks sliding_attention.rope_theta"),
        ({"full_attention": PLAIN, "sliding_attention": 3}, "lacks sliding_attention.rope_theta"),
        ({"full_attention": {"factor": 2.0}, "sliding_attention": PLAIN}, "lacks full_attention.rope_theta"),
        (
            {"full_attention": PLAIN, "sliding_attention": PLAIN | LINEAR},
            ".sliding_attention has a scaling, which Kielo does not support",
        ),
    ],
)
def test_kinds_of_layers_lack_nothing(rope_parameters: Any, complaint: str) -> None:
    given = ropes({"rope_parameters": rope_parameters})
    assert given == f"rope_parameters{'' if complaint[0] == '.' else ' '}{complaint}"


# Of a model that was trained with 8 positions and has 16.
TRAINED = {"original_max_position_embeddings": 8}


def test_the_trained_length_may_stand_beside_the_scaling() -> None:
    """transformers 5 takes the outer value before the inner one, and transformers 4 the inner value."""
    for config in (TRAINED | {"rope_scaling": LLAMA3}, {"rope_scaling": LLAMA3 | TRAINED}):
        reader = ConfigReader(config)
        assert Rope().read(reader, POSITIONS)["rope_scaling"] == LLAMA3 | TRAINED and said(reader) is None
    reader = ConfigReader(TRAINED | {"rope_scaling": LLAMA3 | {"original_max_position_embeddings": 4}})
    Rope().read(reader, POSITIONS)
    assert said(reader) == (
        "original_max_position_embeddings = 8 and 4 in rope_scaling mean the same and differ"
    )
    reader = ConfigReader({"rope_parameters": {"full_attention": PLAIN, "sliding_attention": PLAIN}})
    Rope().read(reader, POSITIONS)
    assert "a table for each kind of layer (full_attention, sliding_attention)" in said(reader)


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.5}


def test_a_scaling_has_just_its_own_numbers() -> None:
    """Lengths that are left out are the model's; the base inside of the table goes before that beside it."""
    assert normalise_rope(None, None, 64) == (10_000.0, None)
    assert normalise_rope(7, {"rope_type": "default", "factor": 2.0}, 64) == (7.0, None)
    assert normalise_rope(7, {"rope_theta": 9, "beta_fast": 3} | LINEAR, 64) == (9.0, LINEAR)
    assert normalise_rope(7, LLAMA3, 64)[1] == LLAMA3 | {"original_max_position_embeddings": 64}
    own = LLAMA3 | {"original_max_position_embeddings": 32, "high_freq_factor": 1.5, "type": "yarn"}
    expected = {key: value for key, value in own.items() if key != "type"}
    assert normalise_rope(7, own, 64) == (7.0, expected)
    assert normalise_rope(1.5, YARN, 64)[1] == YARN | {
        "original_max_position_embeddings": 64, "beta_fast": 32, "beta_slow": 1,
    }  # fmt: skip
    zero = YARN | {"mscale": 0, "mscale_all_dim": 0.0, "beta_fast": 0}
    assert normalise_rope(2, zero, 64)[1]["beta_fast"] == 32
    assert normalise_rope(2, LINEAR | {"partial_rotary_factor": 0.25}, 64, rotary_share=0.25)[1] == LINEAR


@pytest.mark.parametrize(
    ("theta", "scaling", "complaint"),
    [
        (7, [3], "rope_scaling = [3] does not fit: expected a table of rope_type and numbers"),
        (0, None, "rope_theta = 0 does not fit: expected a number above 0"),
        (7, {"rope_theta": "x"}, "rope_theta = 'x' does not fit: expected a number above 0"),
        (7, {"rope_type": "dynamic"},
         "rope_scaling.rope_type = 'dynamic' is not supported; known: default, linear, llama3, yarn"),
        (7, {"type": 3}, "rope_scaling.rope_type = 3 is not supported; known: default, linear, llama3, yarn"),
        (7, {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5 is not supported; only 1.0"),
        (7, YARN | {"truncate": False}, "rope_scaling.truncate = False is not supported; only true"),
        (7, LINEAR | {"factor": 0}, "rope_scaling.factor = 0 does not fit: expected a number above 0"),
        (7, LINEAR | {"mscale": -1}, "rope_scaling.mscale = -1 does not fit: expected a number above 0"),
        (7, YARN | {"mscale_all_dim": "x"},
         "rope_scaling.mscale_all_dim = 'x' does not fit: expected a number above 0"),
        (7, YARN | {"original_max_position_embeddings": 64.5},
         "rope_scaling.original_max_position_embeddings = 64.5 does not fit: expected a whole number from 1 "
         "on"),
        (7, {"rope_type": "linear"}, "rope_scaling of type 'linear' lacks factor"),
        (7, {"rope_type": "llama3", "factor": None},
         "rope_scaling of type 'llama3' lacks factor, low_freq_factor, high_freq_factor"),
        (7, {"rope_type": "yarn"}, "rope_scaling of type 'yarn' lacks factor, attention_factor"),
        (7, LLAMA3 | {"low_freq_factor": 4.0},
         "rope_scaling.low_freq_factor = 4.0 does not fit: expected less than high_freq_factor = 4.0"),
        (1, YARN, "rope_theta = 1 does not fit; yarn needs a number above 1"),
    ],
)  # fmt: skip
def test_a_scaling_that_does_not_fit_is_told(theta: float, scaling: Any, complaint: str) -> None:
    with pytest.raises(KieloError) as caught:
        normalise_rope(theta, scaling, 64)
    assert str(caught.value) == f"model.{complaint}"
