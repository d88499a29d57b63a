"""The pool itself: what a test sees when a worker raises, dies or hangs."""

import os
import time
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from gloo_pool import WorkerError


@dataclass(frozen=True)
class Message:
    text: str


def answer(message):
    value = torch.tensor([dist.get_rank() + 1])
    dist.all_reduce(value)
    return Message(f"{message.text} {value.item()} of {dist.get_world_size()}")


def raise_on_rank_2():
    if dist.get_rank() == 2:
        raise ArithmeticError("odd")
    dist.barrier()


def die_on_rank_3():
    if dist.get_rank() == 3:
        os._exit(3)
    dist.barrier()


def hang_on_rank_1():
    if dist.get_rank() == 1:
        time.sleep(100)
    dist.barrier()


def test_failures_are_reported_and_the_next_call_works(gloo_pool):
    expected = [Message("sum 10 of 4")] * 4
    assert gloo_pool.run(answer, Message("sum")) == expected
    with pytest.raises(WorkerError, match=r"(?s)rank 2 raised.*ArithmeticError: odd"):
        gloo_pool.run(raise_on_rank_2)
    with pytest.raises(WorkerError, match="rank 3 died"):
        gloo_pool.run(die_on_rank_3)
    with pytest.raises(WorkerError, match=r"(?s)not done after 2 s.*in hang_on_rank_1"):
        gloo_pool.run(answer, Message("start"), timeout=200)
        gloo_pool.run(hang_on_rank_1, timeout=2)
    assert gloo_pool.run(answer, Message("sum")) == expected


def test_a_local_function_is_refused(gloo_pool):
    def local():
        pass

    with pytest.raises(TypeError, match="not at module level"):
        gloo_pool.run(local)
