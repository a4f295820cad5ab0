"""Measure: which component held the most bytes, and when."""

from hf_longmoe.peaks.region import component
from hf_longmoe.peaks.report import ComponentPeak, PeakReport, load_reports, save_reports
from hf_longmoe.peaks.storage import StorageProbe

__all__ = ["ComponentPeak", "PeakReport", "StorageProbe", "component", "load_reports", "save_reports"]
