"""Functions of files that load torch, transformers or matplotlib, imported when a name of this file is used.

So `late.verify_parity(...)` costs its seconds only when it is called, and type checkers see its own
signature.
"""

# ruff: noqa: F401 - the imports are for type checkers

import ast
import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kielo.checkpoint.average import average as average
    from kielo.checkpoint.gguf_export import export_gguf as export_gguf
    from kielo.checkpoint.hugging_face_export import export as export_hugging_face
    from kielo.evaluate.encoder import fill_prompts as fill_prompts
    from kielo.evaluate.encoder import load_encoder as load_encoder
    from kielo.evaluate.generate import Chat as Chat
    from kielo.evaluate.generate import Sampling as Sampling
    from kielo.evaluate.generate import continue_text as continue_text
    from kielo.evaluate.score import evaluate_hugging_face as evaluate_hugging_face
    from kielo.evaluate.score import make_scores as make_scores
    from kielo.evaluate.score_alone import score_alone as score_alone
    from kielo.evaluate.score_on_ranks import evaluate_hugging_face_on_ranks as evaluate_hugging_face_on_ranks
    from kielo.evaluate.score_on_ranks import make_scores_on_ranks as make_scores_on_ranks
    from kielo.evaluate.tasks_in_training import TasksInTraining as TasksInTraining
    from kielo.evaluate.watch_on_ranks import watch_on_ranks as watch_on_ranks
    from kielo.ranks.world import meet as meet
    from kielo.ranks.world import once_a_node as once_a_node
    from kielo.report.ladder_page import notes as ladder_notes
    from kielo.report.ladder_page import table as ladder_table
    from kielo.report.ladder_page import write_ladder_report as write_ladder_report
    from kielo.report.plan_figures import parts_svg as parts_svg
    from kielo.report.plan_figures import scaling_svg as scaling_svg
    from kielo.report.plan_figures import timeline_svg as timeline_svg
    from kielo.report.write import write_report as write_report
    from kielo.train.run import measure as measure
    from kielo.train.run import train as train
    from kielo.verify.layouts import CERTIFICATE_NAME as LAYOUTS_CERTIFICATE
    from kielo.verify.layouts import verify_layouts as verify_layouts
    from kielo.verify.parity import verify_parity as verify_parity
    from kielo.verify.parity_on_ranks import verify_parity_on_ranks as verify_parity_on_ranks
    from kielo.verify.preflight.check_nodes import preflight as preflight
    from kielo.verify.rehearse import rehearse as rehearse
    from kielo.verify.rehearse_scoring import rehearse_evaluation as rehearse_evaluation
    from kielo.verify.round_trip import table as round_trip_table
    from kielo.verify.round_trip import verdict as round_trip_verdict
    from kielo.verify.round_trip import verify_round_trip as verify_round_trip
    from kielo.verify.serving import SERVING_NAME as SERVING_NAME
    from kielo.verify.serving import run_of_export as run_of_export
    from kielo.verify.serving import verify_export as verify_export
    from kielo.verify.source_folder import position_heads_verdict as position_heads_verdict
    from kielo.verify.source_folder import verify_position_heads as verify_position_heads

if not TYPE_CHECKING:
    _tree = ast.parse(Path(__file__).read_text(encoding="utf-8"))
    _imports = [node for node in ast.walk(_tree) if isinstance(node, ast.ImportFrom)]
    # Name here → file and name there, as imported above.
    _SOURCES = {of.asname: (node.module, of.name) for node in _imports for of in node.names if of.asname}

    def __getattr__(name: str) -> Any:
        if name not in _SOURCES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module, there = _SOURCES[name]
        return getattr(importlib.import_module(module), there)
