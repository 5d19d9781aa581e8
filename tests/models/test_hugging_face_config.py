"""What a reader of a config.json takes, and what it says of all else, key by key."""

import math
from typing import Any

import pytest

from kielo.models.hugging_face_config import ConfigReader, normalise_rope
from kielo.recipe.errors import KieloError

LARGEST = 2**24
KINDS = "a list of 3 of full_attention or sliding_attention, one for each layer"
SIZE = "a whole number from 1 to 16,777,216"
THREE = ["full_attention", "sliding_attention", "full_attention"]


def said(reader: ConfigReader) -> str | None:
    """All complaints, None where there is none."""
    try:
        reader.done()
    except KieloError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("method", "good", "bad", "expected"),
    [
        ("size", [1, 7, LARGEST], [0, -1, LARGEST + 1, 7.0, True, "7", [7]], SIZE),
        ("layers", [1, 10_000], [0, 10_001, 3.0, False], "a whole number from 1 to 10,000"),
        ("whole", [0, 1, 10**9], [-1, 2.0, True], "a whole number"),
        ("number", [1e-9, 1, 0.5, 1e300], [0, 0.0, -1, math.inf, math.nan, True, "1"], "a number above 0"),
        ("switch", [True, False], [0, 1, "true"], "true or false"),
    ],
)
def test_a_value_of_another_kind_is_told_and_the_default_is_taken(
    method: str, good: list[Any], bad: list[Any], expected: str
) -> None:
    """So that reading goes on; a key that is left out is the default without a complaint."""
    for value in good:
        reader = ConfigReader({"key": value}, "c.json")
        assert getattr(reader, method)("key", default=77) is value and said(reader) is None
    for value in [*bad, None]:
        reader = ConfigReader({"key": value}, "c.json")
        assert getattr(reader, method)("key", default=77) == 77
        given = "null" if value is None else repr(value)
        assert said(reader) == f"c.json: key = {given} does not fit; expected {expected}"
    reader = ConfigReader({"other": 3}, "c.json")
    assert getattr(reader, method)("key", default=77) == 77 and said(reader) is None


def test_null_means_what_the_family_says() -> None:
    reader = ConfigReader({"a": None, "b": 5}, "c.json")
    assert reader.size("a", default=3, null=9) == 9 and reader.number("a", default=3, null=None) is None
    assert reader.size("b", default=3, null=9) == 5 and reader.size("c", default=3, null=9) == 3
    assert said(reader) is None


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
    reader = ConfigReader({"key": value}, "c.json")
    reader.number("key", default=1.0)
    assert said(reader) == f"c.json: key = {shown} does not fit; expected a number above 0"


def test_two_names_of_one_key_must_not_differ() -> None:
    """Null is no value beside another one; the first name is the one that is told."""
    reader = ConfigReader({"a": 3, "b": 4, "c": None, "d": 4, "e": None}, "c.json")
    assert reader.size("a", "b", default=1) == 3
    assert said(reader) == "c.json: a = 3 and b = 4 mean the same and differ"
    reader = ConfigReader({"a": 3, "b": 4, "c": None, "d": 4, "e": None}, "c.json")
    assert reader.size("c", "b", "d", default=1) == 4 == reader.size("x", "b", default=1)
    assert said(reader) is None
    assert reader.size("c", "e", default=2) == 2
    assert said(reader) == f"c.json: c = null does not fit; expected {SIZE}"


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
    reader = ConfigReader(config, "c.json")
    assert reader.only("key", *known) == found
    assert said(reader) == (complaint and f"c.json: asks for what Kielo does not do: {complaint}")


@pytest.mark.parametrize(
    ("value", "found", "complaint"),
    [
        (THREE, tuple(THREE), None),
        (None, ("full_attention",) * 3, None),
        (THREE[:2], ("full_attention",) * 3, f"{THREE[:2]!r} does not fit; expected {KINDS}"),
        ([*THREE[:2], "mamba"], ("full_attention",) * 3,
         "['full_attention', 'sliding_attention', 'mamba'] does not fit; expected " + KINDS),
        ("abc", ("full_attention",) * 3, "'abc' does not fit; expected " + KINDS),
    ],
)  # fmt: skip
def test_layer_types_have_a_known_kind_for_each_layer(
    value: Any, found: tuple[str, ...], complaint: str | None
) -> None:
    reader = ConfigReader({"layer_types": value}, "c.json")
    assert reader.layer_types(["full_attention"] * 3) == found
    assert said(reader) == (complaint and f"c.json: layer_types = {complaint}")


def test_every_third_layer_has_no_window() -> None:
    """From the third on; a window of null is refused only where a layer has one."""
    kinds = ("sliding_attention", "sliding_attention", "full_attention") * 2
    assert ConfigReader({}, "c.json").windows(5, 3) == {"layer_types": kinds[:5], "sliding_window": 4096}
    given = {"sliding_window": 7, "layer_types": THREE}
    assert ConfigReader(given, "c.json").windows(3, 2) == given | {"layer_types": tuple(THREE)}
    reader = ConfigReader({"sliding_window": None}, "c.json")
    assert reader.windows(1, 1) == {"layer_types": ("full_attention",)} and said(reader) is None
    reader.windows(2, 3)
    assert said(reader) == "c.json: layer_types has sliding_attention, but sliding_window is null"


def test_the_width_of_a_head_is_rounded_down_and_told() -> None:
    reader = ConfigReader({}, "c.json")
    assert reader.head_dim(20, 4) == 5 and said(reader) is None
    assert reader.head_dim(23, 4) == 5
    assert reader.head_dim(3, 4) == reader.head_dim(3, 4) == 1
    reader.complain("lacks x")
    assert said(reader) == (
        "c.json: hidden_size 23 is no multiple of the 4 attention heads; hidden_size 3 is no multiple of the "
        "4 attention heads; lacks x"
    )


def test_quantised_weights_are_refused_with_all_else() -> None:
    reader = ConfigReader({"quantization_config": {"bits": 4}, "a": 0}, "c.json")
    reader.size("a", default=1)
    assert said(reader) == (
        f"c.json: a = 0 does not fit; expected {SIZE}; asks for what Kielo does not do: quantization_config "
        "(weights must be bf16, fp16 or fp32)"
    )
    assert said(ConfigReader({"quantization_config": None}, "c.json")) is None


LINEAR = {"rope_type": "linear", "factor": 2.0}


def test_one_rope_is_read_from_either_place() -> None:
    """transformers 4's dict goes before 5's; an empty one is none."""
    for config, found in (
        ({}, (300.0, None)),
        ({"rope_theta": 7}, (7.0, None)),
        ({"rope_theta": 7, "rope_scaling": LINEAR}, (7.0, LINEAR)),
        ({"rope_theta": 7, "rope_parameters": LINEAR | {"rope_theta": 9}}, (9.0, LINEAR)),
        ({"rope_scaling": {}, "rope_parameters": LINEAR}, (300.0, LINEAR)),
        ({"rope_scaling": LINEAR, "rope_parameters": {"rope_theta": 9}}, (300.0, LINEAR)),
        ({"partial_rotary_factor": 1.0}, (300.0, None)),
    ):
        assert ConfigReader(config, "c.json").rope(300, 16) == found
    with pytest.raises(KieloError) as caught:
        ConfigReader({"partial_rotary_factor": 0.5, "rope_theta": -1}, "c.json").rope(300.0, 16)
    assert str(caught.value) == (
        "c.json: asks for what Kielo does not do: partial_rotary_factor = 0.5 (known: 1.0); rope_theta = -1 "
        "does not fit; expected a number above 0"
    )


def ropes(config: dict[str, Any], default: float | None = 3e5, windowed: float | None = 2e3) -> Any:
    return ConfigReader(config, "c.json").ropes("theta", default, "local_theta", windowed, 16)


PLAIN = {"rope_type": "default", "rope_theta": 5.0}


def test_two_ropes_are_read_in_both_spellings() -> None:
    assert ropes({}) == (3e5, None, 2e3)
    assert ropes({"theta": 11, "local_theta": 12, "rope_scaling": LINEAR}) == (11.0, LINEAR, 12.0)
    both = {"full_attention": LINEAR | {"rope_theta": 9}, "sliding_attention": PLAIN}
    assert ropes({"theta": 11, "rope_parameters": both}) == (9.0, LINEAR, 5.0)
    for config, default, windowed in (({"local_theta": 7.0}, None, 2e3), ({"theta": 7.0}, 3e5, None)):
        with pytest.raises(KieloError) as caught:
            ropes(config, default, windowed)
        assert str(caught.value) == (
            "c.json: lacks theta, for which versions of transformers take different values"
        )
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
            ".sliding_attention has a scaling, which is not supported",
        ),
    ],
)
def test_kinds_of_layers_lack_nothing(rope_parameters: Any, complaint: str) -> None:
    with pytest.raises(KieloError) as caught:
        ropes({"rope_parameters": rope_parameters})
    assert str(caught.value) == f"c.json: rope_parameters{'' if complaint[0] == '.' else ' '}{complaint}"


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
        (7, [3], "rope_scaling = [3] does not fit; expected a table of rope_type and numbers"),
        (0, None, "rope_theta = 0 does not fit; expected a number above 0"),
        (7, {"rope_theta": "x"}, "rope_theta = 'x' does not fit; expected a number above 0"),
        (7, {"rope_type": "dynamic"},
         "rope_scaling.rope_type = 'dynamic' is not supported; known: default, linear, llama3, yarn"),
        (7, {"type": 3}, "rope_scaling.rope_type = 3 is not supported; known: default, linear, llama3, yarn"),
        (7, {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5 is not supported; only 1.0"),
        (7, YARN | {"truncate": False}, "rope_scaling.truncate = False is not supported; only true"),
        (7, LINEAR | {"factor": 0}, "rope_scaling.factor = 0 does not fit; expected a number above 0"),
        (7, LINEAR | {"mscale": -1}, "rope_scaling.mscale = -1 does not fit; expected a number above 0"),
        (7, YARN | {"mscale_all_dim": "x"},
         "rope_scaling.mscale_all_dim = 'x' does not fit; expected a number above 0"),
        (7, YARN | {"original_max_position_embeddings": 64.5},
         "rope_scaling.original_max_position_embeddings = 64.5 does not fit; expected a whole number from 1 "
         "on"),
        (7, {"rope_type": "linear"}, "rope_scaling of type 'linear' lacks factor"),
        (7, {"rope_type": "llama3", "factor": None},
         "rope_scaling of type 'llama3' lacks factor, low_freq_factor, high_freq_factor"),
        (7, {"rope_type": "yarn"}, "rope_scaling of type 'yarn' lacks factor, attention_factor"),
        (7, LLAMA3 | {"low_freq_factor": 4.0},
         "rope_scaling.low_freq_factor = 4.0 does not fit; expected less than high_freq_factor = 4.0"),
        (1, YARN, "rope_theta = 1 does not fit; yarn needs one above 1"),
    ],
)  # fmt: skip
def test_a_scaling_that_does_not_fit_is_told(theta: float, scaling: Any, complaint: str) -> None:
    with pytest.raises(KieloError) as caught:
        normalise_rope(theta, scaling, 64)
    assert str(caught.value) == f"model.{complaint}"
