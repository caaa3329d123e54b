"""Our own training steps on random weights: one setting after the other, at every length, in one process."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from usp import (
    Batch,
    adamw_init,
    adamw_update,
    global_norm,
    models,
    reduce_grads,
    shard_batch,
    value_and_grad,
)
from usp.arena import Arena
from usp.mesh import TABLES, build_mesh, local_shape
from usp.models import LlamaConfig
from usp.models.plan.candidates import candidates
from usp.models.plan.choose import usable
from usp.models.plan.settings import OPTIONS, with_stored
from usp.optim import clip_scale
from usp.tools.bench import timeline, waits
from usp.tools.bench.job import PLAN, Job, Row, Setting
from usp.tools.bench.place import Place, kernel_name
from usp.tools.bench.shape import figures, guess_seconds, shape
from usp.tools.bench.timing import SHORT, held, largest, measure, release, repeats, wait

ROOMS = (1.0, 0.9)  # of the device's memory, that a planned setting may take: the second when the first fails


def run(job: Job, place: Place) -> None:
    """A row for every setting and length; after one that does not fit, none longer with that setting."""
    cfg = shape(job.model, job.layers, job.window)
    model: Model | None = None
    for setting in job.settings:
        if model is None or (setting.table, setting.ring, setting.moments) != model.made_for:
            del model
            gc.collect()
            model = Model(cfg, setting, place, host_memory=job.host_memory)
        failed = ""
        for done, seq_len in enumerate(sorted(job.seq_lens)):
            row = {**job.facts(), "label": setting.label, "variant": setting.variant, "seq_len": seq_len}
            row |= {"error": f"not tried: {failed}"} if failed else model.row(job, setting, seq_len, done)
            if "out of memory" in row.get("error", "") and not failed:
                failed = f"out of memory at {seq_len} tokens"
            place.emit(row)


class Model:
    """Parameters and moments in float32 on one table and mesh, and steps with any options."""

    def __init__(
        self, cfg: LlamaConfig, setting: Setting, place: Place, *, host_memory: int | None = None
    ) -> None:
        self.cfg, self.place, self.table = cfg, place, TABLES[setting.table]
        host = host_memory or place.host_memory()
        self.host_memory = -largest([-host], place.device)[0]  # one number on all ranks, which choose alike
        self.made_for = setting.table, setting.ring, setting.moments
        self.moments = setting.moments
        self.home = Arena() if setting.moments == "host" else None  # of the moments
        self.sizes = {"dp": 1, "ring": setting.ring, "ulysses": place.world // setting.ring}
        self.mesh: DeviceMesh | Mapping[str, int] = (
            build_mesh(ring=self.sizes["ring"], ulysses=self.sizes["ulysses"])
            if place.world > 1
            else self.sizes
        )
        self.specs = models.param_specs(cfg, self.table)

        def make(_: str, leaf: Any, spec: Any) -> Tensor:
            size = local_shape(spec, leaf.shape, self.mesh)
            if leaf.init == "normal":
                return torch.randn(size, device=place.device) * 0.02
            return torch.ones(size, device=place.device)

        torch.manual_seed(place.rank)
        self.params = models.map_params(make, models.abstract(cfg), self.specs)
        self.state = adamw_init(self.params, arena=self.home)
        self.base = held(place.device)

    def shard(self, seq_len: int) -> Any:
        generator = torch.Generator().manual_seed(seq_len)
        tokens = torch.randint(self.cfg.vocab_size, (1, seq_len), generator=generator)
        return shard_batch(Batch(tokens), table=self.table, mesh=self.mesh, device=self.place.device)

    def step(self, shard: Any, **options: Any) -> Callable[[], Tensor]:
        """One training step: loss, gradients, clipping, AdamW."""
        loss_and_grads = value_and_grad(
            lambda p: models.loss(p, shard, self.cfg, table=self.table, mesh=self.mesh, **options)
        )

        def step() -> Tensor:
            loss, grads = loss_and_grads(self.params)
            grads = reduce_grads(grads, self.specs, self.mesh)
            scale = clip_scale(global_norm(grads, self.specs, self.mesh), 1.0)
            adamw_update(self.params, grads, self.state, lr=1e-5, grad_scale=scale)
            result: Tensor = loss.detach()
            return result

        return step

    def foretold(self, seq_len: int, **options: Any) -> models.Memory:
        given = {"moments": self.moments, **options}
        return models.training_memory(self.cfg, self.table, self.sizes, batch=1, seq_len=seq_len, **given)

    def plans(self, setting: Setting, seq_len: int, **given: Any) -> Iterator[dict[str, Any]]:
        """The setting's options; for remat="plan" the fastest that fit, more cautiously each time."""
        if setting.remat != PLAN:
            options = {name: getattr(setting, name) for name in OPTIONS}
            yield {**options, "remat": with_stored(setting.remat, setting.stored, self.cfg.num_layers)}
            return
        world, ring = setting.like or self.place.world, setting.ring
        sizes = {"dp": 1, "ring": ring, "ulysses": world // ring}
        seq_len = seq_len * world // self.place.world
        gpu = usable(self.place.memory())
        for room in ROOMS:
            for one in candidates(self.cfg, self.table, sizes, seq_len, moments=self.moments):
                options = replace(one, head_chunks=max(one.head_chunks, setting.head_chunks)).options()
                memory = models.training_memory(
                    self.cfg, self.table, sizes, batch=1, seq_len=seq_len, moments=self.moments, **given,
                    **options,
                )  # fmt: skip
                if memory.peak.nbytes <= gpu * room and memory.host <= self.host_memory:
                    yield options
                    break

    def row(self, job: Job, setting: Setting, seq_len: int, done: int) -> Row:
        """Facts and figures of one setting at one length, or the error it ended with."""
        device = self.place.device
        compiled = device.type == "cuda" if setting.compile is None else setting.compile
        row: Row = {**job.facts(), "label": setting.label, "variant": setting.variant, "seq_len": seq_len}
        row |= {"table": setting.table, "ring": setting.ring, "moments": setting.moments, "base": self.base}
        row |= {"error": "nothing fits, as the plan foretells"}
        given: dict[str, Any] = {"dtype": self.place.dtype, "compile": compiled}
        guess = guess_seconds(self.cfg, seq_len, self.place.world, device.type)
        for options in self.plans(setting, seq_len, **given):
            release(device)  # also what an attempt that ran out of memory has left
            memory, arena = self.foretold(seq_len, **given, **options), Arena()
            steps, warmup = repeats(guess, job.steps)
            own = {"arena": arena if options["offload"] == "host" else None}
            row |= {**options, "compile": compiled, "dtype": str(self.place.dtype).removeprefix("torch.")}
            row |= {
                "foretold": memory.peak.nbytes,
                "foretold_base": memory.peak.at_rest,
                "foretold_host": memory.host,
            }
            try:
                row["kernel"] = kernel_name(job.kernel, self.cfg, self.place)
                for length in SHORT if not warmup and done < len(SHORT) else ():
                    short = self.shard(length * self.place.world)
                    self.step(short, **given, **options, **own, kernel=row["kernel"])()
                step = self.step(self.shard(seq_len), **given, **options, **own, kernel=row["kernel"])
                row |= measure(step, steps=steps, warmup=warmup, device=device)
            except torch.OutOfMemoryError as e:
                row["error"] = f"out of memory: {str(e)[:160]}"
                continue
            except ValueError as e:  # what the model refuses, on every rank
                return {**row, "error": str(e)}
            del row["error"]
            row["host_bytes"] = arena.nbytes + (0 if self.home is None else self.home.nbytes)
            if job.trace:
                name = re.sub(r"[^a-z0-9]+", "-", setting.label)
                row |= self.trace(step, Path(job.trace) / f"{name}-{seq_len}.json")
            return figures(row, self.cfg)
        return row

    def trace(self, step: Callable[[], Tensor], path: Path) -> Row:
        """A Chrome trace of one more step, from the first rank, and beside it what it says, drawn too."""
        with torch.profiler.profile() as profile:
            step()
            wait(self.place.device)
        if self.place.rank:
            return {}
        path.parent.mkdir(parents=True, exist_ok=True)
        profile.export_chrome_trace(str(path))
        work = waits.work_of(path)
        found = waits.streams(work)
        path.with_suffix(".txt").write_text("\n".join(waits.report(found)) + "\n", encoding="utf-8")
        timeline.draw(work, path.with_suffix(".png"))
        return {"waits": found[0].waits} if found else {}
