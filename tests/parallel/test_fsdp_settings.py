"""What FSDP2 is told of layers, an untied head and the root, and before each micro-batch by its ZeRO."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

from kielo.parallel import fsdp
from kielo.parallel.fsdp import COMPUTE_DTYPES, apply_fsdp, forward_only, set_last_micro_batch
from kielo.parallel.mesh import build_mesh
from kielo.recipe.sections import Layout
from kielo.verify.torch_fakes import fake_world


class Told(nn.Module):
    """A module that FSDP2 has wrapped, and notes what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("set_") or name in ("reshard", "unshard"):
            return lambda *given, **options: self.told.append((name, *given, *options.items()))
        return super().__getattr__(name)


class Model(Told):
    def __init__(self, is_tied: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({"0": Told(), "1": Told()})
        self.config, self.head = SimpleNamespace(tie_word_embeddings=is_tied), Told()


@pytest.fixture
def wrapped(monkeypatch: pytest.MonkeyPatch) -> list[tuple[nn.Module, dict[str, Any]]]:
    """What is wrapped, with its options."""
    calls: list[tuple[nn.Module, dict[str, Any]]] = []
    monkeypatch.setattr(fsdp, "FSDPModule", Told)
    monkeypatch.setattr(fsdp, "fully_shard", lambda module, **options: calls.append((module, options)))
    return calls


@pytest.mark.parametrize(
    ("zero", "is_last", "sync", "all_reduce", "reshard", "of_root"),
    [
        (1, False, False, False, False, False), (2, False, True, False, False, False),
        (3, False, True, False, True, False), (1, True, True, True, True, True),
        (2, True, True, True, True, True), (3, True, True, True, True, True),
    ],
)  # fmt: skip
def test_what_waits_for_the_last_micro_batch(zero, is_last, sync, all_reduce, reshard, of_root) -> None:
    """At degree 1 all; at 2 whole parameters and the sum across replicas; at 3 that sum, and the root's."""
    model = Model()
    model.zero = zero
    set_last_micro_batch(model, is_last)
    assert model.told == [
        ("set_requires_gradient_sync", sync), ("set_requires_all_reduce", all_reduce),
        ("set_is_last_backward", is_last), ("set_reshard_after_backward", reshard),
        ("set_reshard_after_backward", of_root, ("recurse", False)),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("sizes", "ranks", "offloads", "precision", "is_tied"),
    [
        ({"shard": 3, "zero": 3}, (3,), False, "bf16", False),
        ({"shard": 3, "replicate": 2, "zero": 2}, (2, 3), False, "fp32", True),
        ({"shard": 3, "zero": 1, "cpu_offload": True}, (3,), True, "fp8", False),
    ],
)  # fmt: skip
def test_layers_and_the_root_are_wrapped_alike(sizes, ranks, offloads, precision, is_tied, wrapped) -> None:
    """Only layers give up their parameters after the forward, at degree 3; gradients are summed in fp32.

    The last layer has an untied head gathered during its own forward.
    """
    layout, model = Layout(**sizes), Model(is_tied)
    heads = [] if is_tied else [model.head]
    size = 1
    for number in ranks:
        size *= number
    with fake_world(1, size, has_pipeline=False) as world:
        apply_fsdp(model, build_mesh(world, layout), layout, precision)
        assert [module for module, _ in wrapped] == [*model.layers.values(), *heads, model]
        gives_up = [options["reshard_after_forward"] for _, options in wrapped]
        assert gives_up == 2 * [layout.zero == 3] + [False] * (1 + len(heads)) and model.zero == layout.zero
        for _, options in wrapped:
            assert tuple(options["mesh"].shape) == ranks
            assert options["mp_policy"].param_dtype == COMPUTE_DTYPES[precision]
            assert options["mp_policy"].reduce_dtype == torch.float32
            policy = options["offload_policy"]
            assert type(policy) is (CPUOffloadPolicy if offloads else OffloadPolicy)
            assert not (offloads and policy.pin_memory)  # a processor pins none
    told = [("set_gradient_divide_factor", 1.0), ("set_force_sum_reduction_for_comms", True)]
    prefetched = [("set_modules_to_forward_prefetch", heads)] if heads else []
    assert model.layers["1"].told[: len(prefetched)] == prefetched
    del model.layers["1"].told[: len(prefetched)]
    of_head = [("set_unshard_in_backward", False)] if heads else []
    assert [module.told for module in (model, *model.layers.values())] == 3 * [told]
    assert model.head.told == [*of_head, *told]


def test_one_rank_divides_nothing_and_bf16_has_a_reduction_of_its_own(wrapped) -> None:
    for size in (1, 2):
        wrapped.clear()
        model, layout = Model(), Layout(shard=size)
        with fake_world(0, size, has_pipeline=False) as world:
            apply_fsdp(model, build_mesh(world, layout), layout, "fp32", "bf16")
        names = [name for name, *_ in model.told]
        assert names == ["set_gradient_divide_factor", "set_force_sum_reduction_for_comms",
                         "set_custom_reduce_scatter"][: 3 * (size > 1)]  # fmt: skip


class GatheredHead(Told):
    """A head as FSDP2 wraps it, whose gather has begun or not."""

    def __init__(self, is_begun: bool) -> None:
        super().__init__()
        group = SimpleNamespace(_all_gather_result=object() if is_begun else None)
        self._get_fsdp_state = lambda: SimpleNamespace(_fsdp_param_group=group)


@pytest.mark.parametrize("was_training", [True, False])
def test_an_evaluation_leaves_the_model_sharded_and_as_it_was(was_training, wrapped, monkeypatch) -> None:
    """Also if it fails: a gather that the head has begun is finished, and none begins on one rank alone."""
    monkeypatch.setattr(fsdp, "Head", GatheredHead)
    for is_begun in (True, False):
        model = Model().train(was_training)
        model.head = GatheredHead(is_begun)
        with pytest.raises(ValueError, match="odd"), forward_only(model):
            raise ValueError("odd")
        assert model.head.told == [("unshard",)] * is_begun + [("reshard",)]
    model = Model().train(was_training)
    with pytest.raises(ValueError, match="odd"), forward_only(model):
        assert not model.training and not torch.is_grad_enabled() and model.told == []
        raise ValueError("odd")
    assert model.training == was_training and torch.is_grad_enabled()
    assert [module.told for module in (model, *model.layers.values(), model.head)] == 4 * [[("reshard",)]]
