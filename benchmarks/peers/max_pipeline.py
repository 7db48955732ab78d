"""MAX: its model worker with prefix caching, all requests handed over at once.

Its class for offline inference takes texts and gives texts; this talks to the same worker one layer below, where token
ids go in and out.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from time import perf_counter
from typing import Any

from peer_protocol import Job, Params, Row, Samples, Task, answer, asked_jobs, measure, parse_task, read_rows

STARTED = perf_counter()
os.environ.setdefault("MAX_SERVE_DISABLE_TELEMETRY", "1")

SEQUENCES = 64  # with more, and with more memory, it was killed on a machine of 24 GiB
MEMORY_SHARE = 0.25  # there is no option for a number of KV tokens


def pipeline_args(task: Task) -> Any:
    from max.driver import DeviceSpec
    from max.pipelines.lib import PipelineArgs

    return PipelineArgs.from_flat_kwargs(
        model_path=str(task.model),
        quantization_encoding=task.dtype,
        max_batch_size=min(task.max_rows, SEQUENCES),
        device_memory_utilization=MEMORY_SHARE,
        enable_prefix_caching=True,
        device_specs=[DeviceSpec.cpu()],
    )


@asynccontextmanager
async def started_worker(task: Task) -> AsyncIterator[tuple[Any, Any]]:
    """The tokenizer, and a model worker in a process of its own."""
    from max.pipelines.context import TextContext, TextGenerationOutput
    from max.pipelines.lib import PIPELINE_REGISTRY, PipelineConfig
    from max.serve.config import Settings
    from max.serve.pipelines.model_worker import start_model_worker
    from max.serve.pipelines.telemetry_worker import start_telemetry_consumer
    from max.serve.worker_interface._zmq_queue import generate_zmq_ipc_path
    from max.serve.worker_interface.zmq_interface import ZmqModelWorkerInterface

    config = PipelineConfig.from_args(pipeline_args(task))
    retrieved = PIPELINE_REGISTRY.retrieve_factory(config)
    settings = Settings(offline_inference=True)
    interface = ZmqModelWorkerInterface[TextContext, TextGenerationOutput](
        PIPELINE_REGISTRY.retrieve_pipeline_task(config.models.main_architecture_name),
        context_type=PIPELINE_REGISTRY.retrieve_context_type(config),
    )
    async with (
        start_telemetry_consumer(settings) as metrics,
        start_model_worker(
            model_factory=retrieved.factory,
            pipeline_config=config,
            settings=settings,
            metric_client=metrics,
            model_worker_interface=interface,
            zmq_endpoint_base=generate_zmq_ipc_path(),
            memory_plan=retrieved.memory_plan,
        ) as worker,
    ):
        yield retrieved.tokenizer, worker


def sampling_params(params: Params) -> Any:
    from max.pipelines.context import SamplingParams

    sampled = {} if params.greedy else {"top_p": params.top_p, "min_p": params.min_p, "top_k": params.top_k or -1}
    return SamplingParams(
        max_new_tokens=params.max_tokens,
        temperature=params.temperature,
        ignore_eos=params.ignore_eos,
        **({"top_k": 1} if params.greedy else sampled),
    )


async def one_sample(tokenizer: Any, worker: Any, row: Row) -> list[int]:
    from max.pipelines.modeling.types import RequestID, TextGenerationRequest

    request = TextGenerationRequest(
        request_id=RequestID(),
        model_name="model",
        prompt=row.prompt,
        sampling_params=sampling_params(row.params),
    )
    context = await tokenizer.new_context(request)
    stream = await worker.stream(context.request_id, context)
    return [token async for outputs, _ in stream for output in outputs for token in output.tokens]


async def all_samples(tokenizer: Any, worker: Any, rows: list[Row]) -> Samples:
    samples = [one_sample(tokenizer, worker, row) for row in rows for _ in range(row.params.n)]
    done = iter(await asyncio.gather(*samples))
    return [[next(done) for _ in range(row.params.n)] for row in rows]


async def run(task: Task, job: Job) -> None:
    note = f"{min(task.max_rows, SEQUENCES)} sequences, KV from {MEMORY_SHARE:.0%} of the memory"
    async with started_worker(task) as (tokenizer, worker):
        loop = asyncio.get_running_loop()
        load_s = perf_counter() - STARTED

        def generate(rows: list[Row]) -> Samples:
            return asyncio.run_coroutine_threadsafe(all_samples(tokenizer, worker, rows), loop).result()

        answer(await asyncio.to_thread(measure, load_s, read_rows(job), generate, distribution="max", note=note))


def main() -> None:
    task = parse_task()
    if task.dtype != "float32":
        raise ValueError(f"MAX runs this model in float32 only on a CPU, not in {task.dtype}")
    for job in asked_jobs():
        asyncio.run(run(task, job))
        return  # nothing empties its prefix cache for another run


if __name__ == "__main__":
    main()
