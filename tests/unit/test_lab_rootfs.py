"""The recipe of the root file system, and what is read from the host's apt."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from gpucr_hpc import proc
from gpucr_hpc.errors import LabError
from gpucr_hpc.lab import plugin, rootfs
from gpucr_hpc.lab.boot import NodeFile, NodeSpec
from gpucr_hpc.lab.recipe import Layer, Recipe, mmdebstrap_argv
from gpucr_hpc.lab.wait import wait_until


def test_digest_is_stable_and_ignores_order() -> None:
    """Equal recipes share a build; the order of packages does not count."""
    recipe = Recipe()
    assert recipe.digest() == Recipe().digest()
    assert recipe.digest() == replace(recipe, packages=tuple(reversed(recipe.packages))).digest()


@pytest.mark.parametrize(
    "change", [{"suite": "sid"}, {"packages": ("criu",)}, {"customize": "true"}, {"excluded_paths": ()}]
)
def test_digest_changes_with_every_part(change: dict[str, object]) -> None:
    """Whatever decides the content is in the name."""
    assert Recipe().digest() != replace(Recipe(), **change).digest()  # type: ignore[arg-type]


def test_mmdebstrap_command() -> None:
    """Options before --, then suite, target and mirror; no mirror is mmdebstrap's own choice."""
    argv = mmdebstrap_argv(Recipe(), "/t", "/hook", "http://mirror.test/debian", ('Acquire::http::Proxy "x"',))
    assert argv[argv.index("--") + 1 :] == ["forky", "/t", "http://mirror.test/debian"]
    assert '--aptopt=Acquire::http::Proxy "x"' in argv
    assert mmdebstrap_argv(Recipe(), "/t", "/hook", None, ())[-2:] == ["forky", "/t"]


def test_other_builds_go_when_there_is_a_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A build that fails, without network say, costs nobody the root file system that is there."""
    old, used, left = (tmp_path / name / "rootfs" for name in ("a" * 16, "b" * 16, "building.x"))
    for path in (old, used, left):
        path.mkdir(parents=True)

    def failing(*_: object) -> None:
        raise LabError(reason="no network")

    monkeypatch.setattr(rootfs, "_build", failing)
    with pytest.raises(LabError, match="no network"):
        rootfs.ensure(Recipe(), print, tmp_path, (used,))
    assert old.is_dir()
    assert used.is_dir()
    assert not left.exists()
    monkeypatch.setattr(rootfs, "_build", lambda _recipe, path, *_: path.mkdir(parents=True))
    made = rootfs.ensure(Recipe(), print, tmp_path, (used,))
    assert made.is_dir()
    assert used.is_dir()
    assert not old.exists()


def _targets(*rows: tuple[str, ...]) -> str:
    return "\n".join("\t".join(row) for row in rows)


def test_mirror_is_the_main_archive() -> None:
    """Not security, not updates, not another vendor's, not sources."""
    text = _targets(
        ("http://other.test/apt/", "stable", "main", "Other", "Packages"),
        ("http://mirror.test/debian-security/", "trixie-security", "main", "Debian-Security", "Packages"),
        ("http://mirror.test/debian/", "trixie-updates", "main", "Debian", "Packages"),
        ("http://mirror.test/debian/", "trixie", "main", "Debian", "Sources"),
        ("http://mirror.test/debian/", "trixie", "main", "Debian", "Packages"),
    )
    assert rootfs.pick_mirror(text) == "http://mirror.test/debian"


def test_mirror_before_the_first_update() -> None:
    """Without Release files there is no label: the end of the path decides."""
    text = _targets(
        ("http://other.test/apt/", "stable", "main", "$(LABEL)", "Packages"),
        ("http://mirror.test/debian/", "trixie", "main", "$(LABEL)", "Packages"),
    )
    assert rootfs.pick_mirror(text) == "http://mirror.test/debian"


def test_no_mirror_on_a_host_without_debian() -> None:
    """Then mmdebstrap's default is taken."""
    assert rootfs.pick_mirror(_targets(("http://u.test/ubuntu/", "noble", "main", "Ubuntu", "Packages"))) is None
    assert rootfs.pick_mirror("") is None


def test_cached_root_file_system_is_used(tmp_path: Path) -> None:
    """What has the final name is complete: nothing is built."""
    target = rootfs.path_of(Recipe(), tmp_path)
    target.mkdir(parents=True)
    assert target == rootfs.ensure(Recipe(), pytest.fail, tmp_path)


def test_plugin_digest_follows_the_sources(tmp_path: Path) -> None:
    """Content and names count; build results beside the sources do not."""
    (tmp_path / "a.c").write_text("1")
    root = Path("/cache/0123/rootfs")
    first = plugin.sources_digest(tmp_path, root)
    (tmp_path / "build").mkdir()
    (tmp_path / "build/a.o").write_text("x")
    assert first == plugin.sources_digest(tmp_path, root)
    (tmp_path / "a.c").write_text("2")
    assert first != plugin.sources_digest(tmp_path, root)
    assert first != plugin.sources_digest(tmp_path, Path("/cache/4567/rootfs"))


def test_plugin_install_replaces_adds_and_removes(tmp_path: Path) -> None:
    """The directory that the nodes see becomes equal to the build; a second time nothing changes."""
    built, target = tmp_path / "built", tmp_path / "target"
    built.mkdir()
    target.mkdir()
    (built / "gpucr.so").write_text("new")
    (target / "gpucr.so").write_text("old")
    (target / "gone").write_text("old")
    assert plugin.install(built, target)
    assert {path.name: path.read_text() for path in target.iterdir()} == {"gpucr.so": "new"}
    assert not plugin.install(built, target)
    assert plugin.install(None, target)
    assert list(target.iterdir()) == []


def test_node_spec_survives_json() -> None:
    """The spec goes to `boot` as JSON, with binary files in it."""
    texts = dict.fromkeys(
        ("name", "role", "address", "gateway", "bridge", "link", "lower", "work_dir", "shared", "package"), "x"
    )
    spec = NodeSpec(
        **texts,
        plugin="p",
        pid_file="f",
        prefix_length=24,
        cgroup_version=1,
        devices={"nvidia0": [195, 0]},
        host_directories=["/usr"],
        links={"/usr/lib/libcuda.so.1": "/host/usr/lib/libcuda.so.1"},
        files={"/etc/key": NodeFile(bytes(range(256)), 0o400, "munge")},
    )
    assert spec == NodeSpec.from_json(spec.to_json())


def test_wait_until_returns_the_value_or_says_what_did_not_come() -> None:
    """The first true value is the result; a limit that passes names what was waited for."""
    values = iter([0, "", "there"])
    assert wait_until(lambda: next(values), 5, "it") == "there"
    with pytest.raises(LabError, match="in vain for the moon"):
        wait_until(lambda: False, 0.02, "the moon")


def test_layer_has_the_packages_that_are_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Downloaded against the root file system's own status, unpacked, customized, and kept only when it is whole."""
    recipe, layer = Recipe(excluded_paths=("/usr/share/doc/*",)), Layer("x", ("hello",), "echo yes >$1/etc/made")
    root = rootfs.path_of(recipe, tmp_path)
    root.mkdir(parents=True)
    calls: list[list[str]] = []

    def run(argv: list[str], **_: object) -> proc.Result:
        calls.append(argv)
        if "--download-only" in argv:
            cache = Path(next(word for word in argv if word.startswith("Dir::Cache::Archives=")).partition("=")[2])
            (cache / "hello_1_all.deb").touch()
        if argv[0] == "dpkg-deb":
            for name in ("etc", "usr/bin", "usr/share/doc/hello"):
                (Path(argv[-1]) / name).mkdir(parents=True)
        return real(argv) if argv[0] == "sh" else proc.Result(argv, 0, "", "", 0.0)

    real = proc.run
    monkeypatch.setattr(rootfs.proc, "run", run)
    target = rootfs.ensure_layer(recipe, layer, lambda _: None, tmp_path)
    assert target == rootfs.ensure_layer(recipe, layer, lambda _: None, tmp_path)
    assert 4 == len(calls), "the second time nothing is fetched"
    assert f"Dir::State::status={root}/var/lib/dpkg/status" in calls[1]
    assert (target / "etc/made").read_text() == "yes\n"
    assert [] == list((target / "usr/share/doc").iterdir())
    assert {"rootfs", target.name} == {path.name for path in root.parent.iterdir()}
