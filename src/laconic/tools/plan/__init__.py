"""Forecasts of the cost of a step."""

from laconic.tools.plan.script import probe_script as probe_script

__all__ = ["probe_script"]
