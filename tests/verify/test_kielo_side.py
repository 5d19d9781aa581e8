"""The one process that checks parity: how exact its products are, and what is left of it."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from kielo.recipe.errors import KieloError
from kielo.verify import kielo_side
from kielo.verify.kielo_side import world_of_one


@pytest.fixture(autouse=True)
def precision():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision(before)


def test_products_are_exact_until_the_check_has_ended() -> None:
    """Then all is as it was before, also after an error."""
    with pytest.raises(ZeroDivisionError), world_of_one(30.0, "cpu") as world:
        assert (world.rank, world.size, dist.get_world_size()) == (0, 1, 1)
        assert torch.get_float32_matmul_precision() == "highest"
        raise ZeroDivisionError
    assert not dist.is_initialized() and torch.get_float32_matmul_precision() == "high"


def test_two_processes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []
    monkeypatch.setattr(kielo_side, "start_world", lambda seconds, device: SimpleNamespace(size=2))
    monkeypatch.setattr(kielo_side, "end_world", lambda: ended.append("ended"))
    with (
        pytest.raises(KieloError, match="checked by one process, and 2 were started"),
        world_of_one(1, "cpu"),
    ):
        pytest.fail("it began")
    assert ended == ["ended"]
