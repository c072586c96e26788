"""gpucr config check: the file is good, or the exit code and the last line say what is wrong."""

from __future__ import annotations

import json

from site_sample import Site


def test_good_and_bad(site: Site) -> None:
    """For people and for programs."""
    assert site.run("config", "check") == "configuration: good\n"
    assert json.loads(site.run("config", "check", "--json")) == {"type": "config_check", "good": True}
    site.config.write_text("[store]\nrot = 1\n")
    *_, last = site.run("config", "check", "--json", status=2).splitlines()
    record = json.loads(last)
    assert (record["type"], record["id"], "rot" in record["message"]) == ("exit_error", "ConfigError", True)
