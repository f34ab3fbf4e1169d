"""The list of licenses that goes into a wheel: complete, of what is linked only."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

import pytest

PATH = Path(__file__).parents[2] / "deploy" / "third_party_licenses.py"
spec = importlib.util.spec_from_file_location("third_party_licenses", PATH)
assert spec is not None
assert spec.loader is not None
licenses = importlib.util.module_from_spec(spec)
spec.loader.exec_module(licenses)


def package(folder: Path, **fields):
    base = {"name": "one", "version": "1.0.0", "license": None, "license_file": None}
    base |= {"authors": [], "repository": None, "homepage": None}
    return base | {"manifest_path": str(folder / "Cargo.toml")} | fields


@pytest.fixture(scope="module")
def linked():
    if shutil.which("cargo") is None:
        pytest.skip("no cargo")
    return licenses.linked(licenses.metadata(licenses.host()))


def test_what_is_linked_is_listed_and_what_runs_in_the_compiler_is_not(linked):
    names = {one["name"] for one in linked}
    assert len(names) > 100
    assert names >= {"pyo3", "tokio", "onig_sys", "ring", "rustls", "tokenizers"}
    assert not names & {"cc", "paste", "proptest", "pyo3-macros", "serde_derive", "syn"}
    assert not any(name.startswith("kvflash") for name in names)


def test_every_linked_crate_has_a_text_sources_in_c_included(linked):
    text = licenses.document(linked, licenses.host())
    index, _, texts = text.partition("=" * 80)
    for one in linked:
        name = f"{one['name']} {one['version']}"
        assert f"\n{name}: " in index
        assert name in texts
    assert "\nRust standard library: " in index
    # Oniguruma, below onig_sys.
    assert "K.Kosako" in texts


def test_files_are_found_below_the_root_but_not_in_tests(tmp_path):
    for name in (
        "LICENSE-MIT",
        "third_party/x/COPYING",
        "NOTICE.txt",
        "tests/LICENSE",
        "license.rs",
    ):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name, encoding="utf-8")
    found = licenses.license_files(package(tmp_path))
    names = [path.relative_to(tmp_path).as_posix() for path in found]
    assert names == ["LICENSE-MIT", "NOTICE.txt", "third_party/x/COPYING"]


@pytest.mark.parametrize("expression", ["Apache-2.0", "MIT/Apache-2.0", "Apache-2.0 OR BSL-1.0"])
def test_without_a_file_apache_is_taken_where_it_may_be(tmp_path, expression):
    text = licenses.text_without_file(package(tmp_path, license=expression))
    assert "Apache License" in text


def test_without_a_file_mit_names_the_authors(tmp_path):
    text = licenses.document([package(tmp_path, license="MIT", authors=["A. Nyone"])], "host")
    assert "Copyright (c) A. Nyone" in text


@pytest.mark.parametrize("expression", [None, "ISC", "MIT AND BSD-3-Clause"])
def test_a_crate_without_a_text_ends_the_run(tmp_path, expression):
    with pytest.raises(SystemExit, match=r"no license text: one 1\.0\.0"):
        licenses.document([package(tmp_path, license=expression)], "host")
