"""Functions of files that load torch, transformers or matplotlib, imported when a name of this file is used.

So `late.verify_parity(...)` costs its seconds only if it is called; type checkers see its own signature.
"""

# ruff: noqa: F401 - the imports are for type checkers

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kielo.checkpoint.average import average as average
    from kielo.checkpoint.hugging_face_export import export as export_hugging_face
    from kielo.evaluate.chat import Chat as Chat
    from kielo.evaluate.encoder import load_encoder as load_encoder
    from kielo.evaluate.fill_mask import fill_prompts as fill_prompts
    from kielo.evaluate.generate import Sampling as Sampling
    from kielo.evaluate.generate import continue_text as continue_text
    from kielo.evaluate.score import evaluate_hugging_face as evaluate_hugging_face
    from kielo.evaluate.score import make_scores as make_scores
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
    from kielo.verify.position_heads import verdict as position_heads_verdict
    from kielo.verify.position_heads import verify_position_heads as verify_position_heads
    from kielo.verify.preflight.check_nodes import preflight as preflight
    from kielo.verify.rehearse import rehearse as rehearse
    from kielo.verify.round_trip import table as round_trip_table
    from kielo.verify.round_trip import verdict as round_trip_verdict
    from kielo.verify.round_trip import verify_round_trip as verify_round_trip

# Name here → file, and name there.
_SOURCES = {
    "Chat": "kielo.evaluate.chat:Chat",
    "LAYOUTS_CERTIFICATE": "kielo.verify.layouts:CERTIFICATE_NAME",
    "Sampling": "kielo.evaluate.generate:Sampling",
    "average": "kielo.checkpoint.average:average",
    "continue_text": "kielo.evaluate.generate:continue_text",
    "evaluate_hugging_face": "kielo.evaluate.score:evaluate_hugging_face",
    "export_hugging_face": "kielo.checkpoint.hugging_face_export:export",
    "fill_prompts": "kielo.evaluate.fill_mask:fill_prompts",
    "ladder_notes": "kielo.report.ladder_page:notes",
    "ladder_table": "kielo.report.ladder_page:table",
    "load_encoder": "kielo.evaluate.encoder:load_encoder",
    "make_scores": "kielo.evaluate.score:make_scores",
    "measure": "kielo.train.run:measure",
    "meet": "kielo.ranks.world:meet",
    "once_a_node": "kielo.ranks.world:once_a_node",
    "parts_svg": "kielo.report.plan_figures:parts_svg",
    "position_heads_verdict": "kielo.verify.position_heads:verdict",
    "preflight": "kielo.verify.preflight.check_nodes:preflight",
    "rehearse": "kielo.verify.rehearse:rehearse",
    "round_trip_table": "kielo.verify.round_trip:table",
    "round_trip_verdict": "kielo.verify.round_trip:verdict",
    "scaling_svg": "kielo.report.plan_figures:scaling_svg",
    "timeline_svg": "kielo.report.plan_figures:timeline_svg",
    "train": "kielo.train.run:train",
    "verify_layouts": "kielo.verify.layouts:verify_layouts",
    "verify_parity": "kielo.verify.parity:verify_parity",
    "verify_position_heads": "kielo.verify.position_heads:verify_position_heads",
    "verify_round_trip": "kielo.verify.round_trip:verify_round_trip",
    "write_ladder_report": "kielo.report.ladder_page:write_ladder_report",
    "write_report": "kielo.report.write:write_report",
}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        if name not in _SOURCES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module, function = _SOURCES[name].split(":")
        return getattr(importlib.import_module(module), function)
