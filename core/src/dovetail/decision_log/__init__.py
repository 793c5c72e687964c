"""The decision log records inputs and decisions of a scheduler, for an exact replay."""

from dovetail.decision_log.encoding import (
    Plain,
    decode_names,
    decode_output,
    decode_request,
    split_readings,
)
from dovetail.decision_log.header import LogHeader
from dovetail.decision_log.log_file import LogReader, Record, RecordKind
from dovetail.decision_log.plan_records import LoggedPlan, PlanDecoder, PlanEncoder
from dovetail.decision_log.recording import DecisionRecorder, RecordedScheduler

__all__ = [
    "DecisionRecorder",
    "LogHeader",
    "LogReader",
    "LoggedPlan",
    "Plain",
    "PlanDecoder",
    "PlanEncoder",
    "Record",
    "RecordKind",
    "RecordedScheduler",
    "decode_names",
    "decode_output",
    "decode_request",
    "split_readings",
]
