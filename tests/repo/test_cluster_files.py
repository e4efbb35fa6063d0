"""The files in `examples/clusters` are valid for the tools that read them, and their commands exist."""

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import jsonschema
import pytest
import typer
import yaml

from rlcore_cli.main import app

FOLDER = Path(__file__).parents[2] / "examples" / "clusters"


def known(required=(), **properties):
    return {"type": "object", "additionalProperties": False, "required": list(required), "properties": properties}


TEXT, COUNT, FLAG = {"type": "string"}, {"type": "integer", "minimum": 0}, {"type": "boolean"}
PARAMETERS = {"type": "object", "additionalProperties": TEXT}
QUANTITIES = known(requests=PARAMETERS, limits=PARAMETERS)
POD = known(
    ["spec"],
    spec=known(
        ["containers"],
        restartPolicy={"enum": ["Always", "OnFailure", "Never"]},
        containers={
            "type": "array",
            "minItems": 1,
            "items": known(
                ["name", "image"],
                name=TEXT,
                image=TEXT,
                env={"type": "array", "items": known(["name", "value"], name=TEXT, value=TEXT)},
                resources=QUANTITIES,
                volumeMounts={"type": "array", "items": known(["name", "mountPath"], name=TEXT, mountPath=TEXT)},
            ),
        },
        volumes={
            "type": "array",
            "items": known(
                ["name"],
                name=TEXT,
                persistentVolumeClaim=known(["claimName"], claimName=TEXT),
                emptyDir=known(medium={"enum": ["Memory", ""]}, sizeLimit=TEXT),
            ),
        },
    ),
)
# The fields that the manifest uses. Source: https://ray-project.github.io/kuberay/reference/api/ and that of Kubernetes.
RAY_JOB = known(
    ["apiVersion", "kind", "metadata", "spec"],
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayJob"},
    metadata=known(["name"], name=TEXT),
    spec=known(
        ["rayClusterSpec"],
        entrypoint=TEXT,
        submissionMode={"enum": ["K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode"]},
        backoffLimit=COUNT,
        shutdownAfterJobFinishes=FLAG,
        ttlSecondsAfterFinished=COUNT,
        rayClusterSpec=known(
            ["headGroupSpec"],
            rayVersion=TEXT,
            authOptions=known(mode={"enum": ["disabled", "token"]}),
            headGroupSpec=known(["template"], rayStartParams=PARAMETERS, template=POD),
            workerGroupSpecs={
                "type": "array",
                "items": known(
                    ["groupName", "maxReplicas", "minReplicas", "template"],
                    groupName=TEXT,
                    replicas=COUNT,
                    minReplicas=COUNT,
                    maxReplicas=COUNT,
                    rayStartParams=PARAMETERS,
                    template=POD,
                ),
            },
        ),
    ),
)


def test_the_rayjob_has_the_fields_and_types_of_kuberay():
    job = yaml.safe_load((FOLDER / "rayjob.yaml").read_text())
    jsonschema.Draft202012Validator(RAY_JOB).validate(job)
    pods = [job["spec"]["rayClusterSpec"][key] for key in ("headGroupSpec",)] + job["spec"]["rayClusterSpec"][
        "workerGroupSpecs"
    ]
    for pod in pods:
        spec = pod["template"]["spec"]
        mounted = {mount["name"] for container in spec["containers"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in spec["volumes"]}
    job["spec"]["rayClusterSpec"]["workerGroupSpecs"][0]["replica"] = 1
    with pytest.raises(jsonschema.ValidationError, match="'replica' was unexpected"):
        jsonschema.Draft202012Validator(RAY_JOB).validate(job)


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize("name", ["slurm.sbatch", "skypilot.yaml"])
def test_the_shell_of_a_file_parses(name):
    text = (FOLDER / name).read_text()
    for script in [text] if name.endswith(".sbatch") else [yaml.safe_load(text)[key] for key in ("setup", "run")]:
        done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("name", ["slurm.sbatch", "skypilot.yaml", "rayjob.yaml"])
def test_the_commands_of_a_file_exist(name):
    text = (FOLDER / name).read_text()
    if name == "rayjob.yaml":
        text = shlex.split(yaml.safe_load(text)["spec"]["entrypoint"])[2].replace(" && ", "\n")
    found = re.findall(r"^ *rlcore (.*?)(?: &)?$", text, flags=re.MULTILINE)
    assert [command.split()[0] for command in found] == ["doctor", "train"]
    checked, trained = [arguments_of(command) for command in found]
    assert checked.pop("cluster") is True
    assert (Path(checked["name"]), checked["overrides"]) == (trained["config"], trained["overrides"])
    assert any("cluster.num_nodes" in change for change in trained["overrides"])
    assert any("cluster.workers_per_node" in change for change in trained["overrides"])


def arguments_of(command):
    subcommand, *words = shlex.split(command)
    context = typer.main.get_command(app).make_context("rlcore", [subcommand, *words], resilient_parsing=True)
    return context.command.get_command(context, subcommand).make_context(subcommand, words, parent=context).params
