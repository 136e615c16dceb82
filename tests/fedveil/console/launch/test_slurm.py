"""What a site asks of Slurm."""

import re

import pytest

from fedveil.console.launch import site
from fedveil.errors import ConfigError


@pytest.mark.parametrize("environ", [{}, {"SLURM_NTASKS": "4"}, {"SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "1"}])
def test_one_task_is_a_site(environ):
    site.require_one_task(environ)


def test_several_tasks_would_be_several_supernodes_with_one_key():
    with pytest.raises(ConfigError, match=re.escape("srun: expected one task")):
        site.require_one_task({"SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2"})
