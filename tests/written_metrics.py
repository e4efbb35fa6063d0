"""Reads back what TensorBoard, Weights & Biases and MLflow wrote."""

import json
import struct
import time


def scalars(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return {name: [(event.step, event.value) for event in events.Scalars(name)] for name in events.Tags()["scalars"]}


def records(path):
    """The whole records of a .wandb file: after 7 bytes, the log format of LevelDB: blocks of 32 KiB with framed pieces."""
    data, piece, at = path.read_bytes(), b"", 7
    assert data[:4] == b":W&B"
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
        length, kind = struct.unpack_from("<HB", data, at + 4)
        if at + 7 + length > len(data):
            return  # it is still being written
        piece += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield piece
            piece = b""


def wandb_rows(folder):
    """The logged rows by run id."""
    from wandb.proto.wandb_internal_pb2 import Record

    rows = {}
    for path in sorted(folder.glob("wandb/offline-run-*/run-*.wandb")):
        for data in records(path):
            record = Record.FromString(data)
            if record.WhichOneof("record_type") == "history":
                row = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
                rows.setdefault(path.stem.removeprefix("run-"), []).append(row)
    return rows


def written_wandb_rows(folder, count):
    """The logged rows by run id, as soon as there are that many.

    The library's own process writes the file, which on a busy machine may end after `finish`.
    """
    give_up = time.monotonic() + 120
    while sum(map(len, (rows := wandb_rows(folder)).values())) < count and time.monotonic() < give_up:
        time.sleep(0.2)
    return rows


def mlflow_run(folder, store="mlflow.db"):
    """The one run of a store, and its metrics by name: (step, value), in the order of the steps."""
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{folder / store}")
    [experiment] = [found for found in client.search_experiments() if found.name != "Default"]
    [run] = client.search_runs([experiment.experiment_id])
    kept = {
        name: sorted((one.step, one.value) for one in client.get_metric_history(run.info.run_id, name))
        for name in run.data.metrics
    }
    return experiment, run, kept
