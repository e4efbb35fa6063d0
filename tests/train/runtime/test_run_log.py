"""What a run prints and writes to logs/driver.log."""

import logging

import pytest

from rl_train.launch.session import _logging_to


@pytest.mark.parametrize("name", ["rlcore", "rl_backends_base.distributed_generation", "rl_train.pools.actor_pool"])
def test_warnings_are_printed_and_all_messages_are_in_the_log_without_secrets(name, tmp_path, capsys):
    logger = logging.getLogger(name)
    with _logging_to(tmp_path, lambda text: text.replace("abc123", "***")):
        logger.info("an actor started with the key abc123")
        logger.warning("an actor with the key abc123 was replaced")
    logger.warning("after the run")
    assert capsys.readouterr().err.count("with the key") == 1
    lines = (tmp_path / "logs" / "driver.log").read_text().splitlines()
    found = [line.partition(" INFO ")[2] or line.partition(" WARNING ")[2] for line in lines]
    assert found == [f"{name}: an actor started with the key ***", f"{name}: an actor with the key *** was replaced"]
