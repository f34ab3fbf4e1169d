"""Reports of the frontend's parts besides the core are combined, in any order."""

from __future__ import annotations

from kvflash.frontend.app import Reports


class Core:
    def __init__(self) -> None:
        self.metrics, self.warnings = "", list[str]()

    def set_more_metrics(self, text: str) -> None:
        self.metrics = text

    def set_warnings(self, warnings: list[str]) -> None:
        self.warnings = warnings


def test_each_part_changes_what_it_said_itself():
    core = Core()
    reports = Reports(core)
    reports.show_metrics("one", "a 1\n")
    reports.show_metrics("two", "b 1\n")
    reports.show_metrics("one", "a 2\n")
    assert core.metrics == "a 2\nb 1\n"
    reports.show_warnings("one", ["x", "y"])
    reports.show_warnings("two", ["z"])
    assert core.warnings == ["x", "y", "z"]
    reports.show_warnings("one", [])
    assert core.warnings == ["z"]
