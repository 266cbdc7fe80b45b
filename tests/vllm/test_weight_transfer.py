"""Tensors over NCCL, as vLLM itself reads them: its request objects, its way to cut the bytes, its server."""

import json
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from safetensors.torch import save_file

from rllm.errors import InferenceError
from rllm.inference.vllm import VLLMClient
from rllm.inference.vllm_process import ServerProcess, ServerSettings
from rllm.models.builtin import create_model
from rllm.models.directory import load_model, save_model
from rllm.models.weight_sending import chunks_of, weights_with_output_layer
from rllm.types.messages import SamplingParams

sys.path.insert(0, str(Path(__file__).parents[1] / "inference"))
from policy_server import PolicyServer
from tensor_receiver import MemoryNccl, MemorySender

pytestmark = pytest.mark.slow

READ_BY_VLLM = """
import contextlib, json, sys
import torch
from safetensors.torch import load_file
from vllm.distributed.weight_transfer import packed_tensor
from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine as Engine

bodies, chunks, expected = json.load(open(sys.argv[1])), load_file(sys.argv[2]), load_file(sys.argv[3])
init = WeightTransferInitRequest(**bodies["/init_weight_transfer_engine"]).init_info
init = Engine.init_info_cls(**init)
assert len(init.nccl_unique_id_bytes) == 128
assert (init.rank_offset, init.world_size, init.packed) == (1, 2, True)
update = Engine.update_info_cls(**WeightTransferUpdateRequest(**bodies["/update_weights"]).update_info)

class Stream:
    def synchronize(self): pass

class Group:
    left = [chunks[str(number)] for number in range(len(chunks))]
    def broadcast(self, tensor, src):
        assert src == 0
        tensor.copy_(self.left.pop(0))

packed_tensor._get_streams = lambda device, number: (Stream(),) * number  # of a GPU, and here is none
torch.cuda.stream = lambda stream: contextlib.nullcontext()
torch.accelerator.current_device_index = lambda: 0
read, told = {}, zip(update.names, update.dtype_names, update.shapes)
packed_tensor.packed_nccl_broadcast_consumer(
    ((name, (shape, getattr(torch, dtype))) for name, dtype, shape in told),
    Group(), 0, lambda parts: read.update((name, part.clone()) for name, part in parts),
    init.packed_buffer_size_bytes, init.packed_num_buffers, "cpu",
)
assert not Group.left and read.keys() == expected.keys()
assert all(torch.equal(read[name], expected[name]) for name in expected)
"""


@asynccontextmanager
async def _hold_weights() -> AsyncIterator[int]:
    yield 3


async def test_vllm_reads_what_is_sent_as_the_weights_that_files_hold(
    vllm_python: str, tmp_path: Path
) -> None:
    create_model(tmp_path / "tied", "tiny", 1)
    model = load_model(tmp_path / "tied")
    save_model(model, tmp_path / "served", with_output_layer=True)
    nccl = MemoryNccl()
    bodies = dict[str, dict[str, object]]()
    with PolicyServer(tmp_path / "served", nccl=nccl) as server:
        respond = server.receiver.respond

        def record(path: str, body: dict[str, object]) -> dict[str, object]:
            bodies[path] = body
            return respond(path, body)  # type: ignore[arg-type]

        server.receiver.respond = record  # type: ignore[method-assign, assignment]
        client = VLLMClient(server.url, tmp_path / "served")
        await client.receive_weights(MemorySender(model, nccl), _hold_weights)
        await client.close()
    chunks = chunks_of(weights_with_output_layer(model), MemorySender.chunk_bytes)
    save_file({str(number): chunk for number, chunk in enumerate(chunks)}, tmp_path / "chunks.safetensors")
    (tmp_path / "bodies.json").write_text(json.dumps(bodies))
    files = (
        tmp_path / "bodies.json",
        tmp_path / "chunks.safetensors",
        tmp_path / "served" / "model.safetensors",
    )
    done = subprocess.run(
        [vllm_python, "-c", READ_BY_VLLM, *map(str, files)], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3_000:]


async def test_a_server_without_a_gpu_refuses_to_join_and_goes_on(vllm_python: str, tmp_path: Path) -> None:
    create_model(tmp_path / "tied", "small", 0)
    model = load_model(tmp_path / "tied")
    save_model(model, tmp_path / "served", with_output_layer=True)
    settings = ServerSettings(
        python=vllm_python,
        model=tmp_path / "served",
        max_context=256,
        max_requests=16,
        max_prefill_tokens=512,
        dtype="float32",
        takes_tensors=True,
    )
    async with ServerProcess(settings, 0, tmp_path / "server.log") as process:
        client = VLLMClient(process.url, tmp_path / "served", processed_logprobs=True, sends_seeds=False)
        with pytest.raises(InferenceError, match="/init_weight_transfer_engine"):
            await client.receive_weights(MemorySender(model, MemoryNccl()), _hold_weights)
        output = await client.generate_ids(list(range(5, 25)), SamplingParams(max_tokens=4))
        assert set(output.policy_versions) == {0}
        await client.close()
