"""House rules that import-linter cannot check: packages, names, signatures, single-device models.

Each check is also shown a planted fault.
"""

from pathlib import Path

import pytest

from kielo.artifact.formats import FORMATS
from tests.house import checks
from tests.house.checks import PACKAGE


@pytest.fixture
def house(tmp_path):
    """An empty house with one family."""
    for folder in ("", "models", "models/llama"):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "__init__.py").touch()
    return tmp_path


def test_every_folder_with_python_is_a_package(house):
    """A folder without __init__.py would leak through the import stairs."""
    assert checks.folders_without_init(PACKAGE) == []
    (house / "attic" / "box").mkdir(parents=True)
    (house / "attic" / "box" / "thing.py").touch()
    assert checks.folders_without_init(house) == ["attic", "attic/box"]


def test_models_inits_are_empty(house):
    """Asking for a family's tables loads nothing else."""
    assert checks.models_inits_with_code(PACKAGE) == []
    (house / "models" / "llama" / "__init__.py").write_text("from kielo.models.llama.model import Llama\n")
    assert checks.models_inits_with_code(house) == ["models/llama/__init__.py"]


def test_no_room_or_file_has_a_name_that_says_nothing(house):
    """No utils, helpers, common, misc, core, base, tools, manager."""
    assert checks.banned_names(PACKAGE) == []
    (house / "models" / "model_utils.py").touch()
    (house / "core").mkdir()
    assert checks.banned_names(house) == ["core", "models/model_utils.py"]


def test_no_two_files_have_one_name(house):
    """Families and verbs have files of one name each; elsewhere a name occurs once."""
    assert checks.repeated_names(PACKAGE) == []
    for folder in ("train", "verify", "cli"):
        (house / folder).mkdir()
        (house / folder / "run.py").touch()
    assert checks.repeated_names(house) == ["run.py"]


def test_no_function_takes_more_than_seven_arguments(house):
    """More than that are fields of a frozen dataclass of options, with names at the call."""
    assert checks.functions_with_many_arguments(PACKAGE) == []
    (house / "models" / "llama" / "model.py").write_text(
        "class A:\n"
        "    def seven(self, a, b, c, d, e, *, f, g): ...\n"
        "    async def eight(a, b, c, d, e, f, *g, **h): ..."
    )
    assert checks.functions_with_many_arguments(house) == ["models/llama/model.py: eight"]


def test_kielo_is_imported_at_the_top_of_files(house):
    """A room that is slow to load is reached through `stages/late.py` or the library."""
    assert checks.files_that_import_late(PACKAGE) <= checks.IMPORT_LATE
    (house / "api.py").write_text("def load():\n    import kielo.recipe.read\n")
    (house / "models" / "one.py").write_text("import kielo.models\n\n\ndef f():\n    import torch\n")
    assert checks.files_that_import_late(house) == set()
    (house / "models" / "two.py").write_text("def f():\n    from kielo.models import families\n")
    (house / "models" / "six.py").write_text("class A:\n    async def f(self):\n        import kielo.train\n")
    assert checks.files_that_import_late(house) == {"models/two.py", "models/six.py"}


def test_files_that_stages_exchange_are_read_through_their_types(house):
    """Nobody else builds their paths, so nobody else parses them."""
    names = {Path(found.file).name for found in FORMATS.values()} - {"recipe.toml"}
    assert checks.exchanged_files_by_name(PACKAGE, names) == []
    for room in ("artifact", "report"):
        (house / room).mkdir()
        (house / room / "gather.py").write_text("scores = json.loads((folder / 'scores.json').read_text())")
    assert checks.exchanged_files_by_name(house, names) == ["report/gather.py:1: scores.json"]


# Bytes of the process itself or of its own workers, and a reader that takes only tables of tensors.
MAY_UNPICKLE = {
    "checkpoint/tensor_table.py: pickle", "checkpoint/tensor_table.py: torch.load",
    "corpus/process_pool.py: pickle", "ranks/flight_record.py: pickle",
}  # fmt: skip


def test_nothing_that_crosses_the_network_is_unpickled():
    assert {*checks.unpicklings(PACKAGE)} == MAY_UNPICKLE


@pytest.mark.parametrize(
    "planted",
    [
        "import torch.distributed as dist\ndist.all_gather_object(found, mine)",
        "from torch.distributed import broadcast_object_list",
        "import cloudpickle",
        "from pickle import loads",
        "import torch\ntorch.load(path)",
        "from multiprocessing.connection import Listener",
        "import torch.distributed.rpc",
    ],
)
def test_what_may_unpickle_is_found(house, planted):
    (house / "models" / "llama" / "model.py").write_text(planted)
    assert checks.unpicklings(house)


@pytest.mark.parametrize(
    "planted",
    [
        "import torch.distributed",
        "from torch import distributed",
        "from torch.distributed.tensor import DTensor",
        "import torch as t\nt.distributed.get_rank()",
        "import torch\nx = torch.cuda.current_device()",
        "import os",
        "from os import environ",
        "def f(x):\n    return x.to('cuda:0')",
        "def f(x):\n    return x.cuda()",
    ],
)
def test_models_are_single_device(house, planted):
    """models/ knows no ranks, no devices and no environment."""
    assert checks.ranks_and_devices_in_models(PACKAGE) == []
    (house / "models" / "llama" / "model.py").write_text(planted)
    assert checks.ranks_and_devices_in_models(house)
