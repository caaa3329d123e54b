"""Training: `torchrun --nproc-per-node 2 -m usp.tools.train --model DIR --data PATH --seq-len N ...`.

Exit codes: 0 done; 143 ended by SIGTERM, --resume goes on after the last step that was done; 1 anything else.
SIGTERM ends a run at once before its first step, otherwise after the step or the tensor of the export that is
under way. It is not taken while Python still loads, and comes too late when the export is whole.
"""

import dataclasses
import os
import shutil
from collections.abc import Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from usp import adamw_init, models
from usp.arena import Arena
from usp.mesh import build_mesh
from usp.state import Saver
from usp.tools import facts
from usp.tools.cli import parse
from usp.tools.config import Train
from usp.tools.loop import run_steps
from usp.tools.options import check_options, step_options
from usp.tools.ranks import Ranks, on_ranks
from usp.tools.resume import State, restore, save
from usp.tools.setup import Mesh, Setup, check_config, prepare, tell_positions
from usp.tools.stop import EXIT_CODE, Stop, Stopped

STATE = "state"


def train(cfg: Train, ranks: Ranks, stop: Stop) -> int:
    """Train, write metrics and plot, and export the result to OUT/hf. Returns the exit code."""
    stop.watch = ranks.watch
    try:
        return _train(cfg, ranks, stop)
    finally:
        stop.finish()


def _train(cfg: Train, ranks: Ranks, stop: Stop) -> int:
    facts.same_everywhere(ranks, facts.options(cfg))
    ranks.checked(partial(check_config, cfg, ranks.world))
    ranks.checked(partial(check_options, cfg))
    torch.manual_seed(cfg.seed)  # nothing draws from it today; what will is then the same in every run
    ranks.doing("reading the data")
    setup = ranks.checked(partial(prepare, cfg, ranks))
    found = ranks.checked(partial(facts.content, cfg, setup.data))
    facts.same_everywhere(ranks, found)
    known = facts.run_facts(cfg, dtype=setup.dtype, num_rows=setup.num_rows, found=found)
    resumed = ranks.checked(lambda: facts.check_same_run(cfg.out, known)) if cfg.resume else False
    sizes = {"dp": cfg.dp, "ring": cfg.ring, "ulysses": cfg.ulysses}
    mesh: Mesh = build_mesh(**sizes, device_type=ranks.device.type) if ranks.world > 1 else sizes
    options = step_options(cfg, setup, mesh, ranks)
    home = Arena() if options.pop("moments") == "host" else None  # of the moments
    tell_positions(ranks, setup.model, setup.data.num_positions)
    ranks.doing("reading the model")
    state = restore(cfg.out / STATE, setup, mesh, ranks, home) if resumed else None
    state = first_state(cfg, setup, mesh, ranks, home) if state is None else state
    if ranks.exchange(finished(cfg, state))[0]:
        if ranks.first:
            print(f"{cfg.out} holds step {state.step} and its export: nothing is left to do", flush=True)
        return 0
    group: Any = None
    if ranks.world > 1:  # of its own: a save goes on beside the collectives of the steps
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=cfg.timeout))
    saver = Saver(cfg.out / STATE, mesh=mesh, keep=cfg.keep, over=group)
    stop.begin(ranks)
    ranks.checked(lambda: start_folder(cfg, setup, known) if ranks.first else None)
    began = state.step
    state = run_steps(cfg, setup, state, mesh, ranks, saver, stop, options)
    if state.step == cfg.steps:
        ranks.doing("the export")
        try:
            export(cfg, setup, state, mesh, ranks, stop)
            return 0
        except Stopped:
            if began < state.step != saver.last:
                ranks.checked(partial(save, saver, setup, state, mesh, ranks))
                ranks.checked(saver.wait)
    if ranks.first:
        print(f"ended by SIGTERM after step {state.step}; --resume goes on from there", flush=True)
    return EXIT_CODE


def export(cfg: Train, setup: Setup, state: State, mesh: Mesh, ranks: Ranks, stop: Stop) -> None:
    """OUT/hf, as a whole or not at all; raises Stopped, on all ranks, between two tensors."""
    write = partial(
        models.to_hf, state.params, setup.model, cfg.out / "hf", source=cfg.model, table=setup.table,
        mesh=mesh, dtype=setup.dtype, between=stop.check,
    )  # fmt: skip
    ranks.checked(write)
    if ranks.first:
        print(f"saved {cfg.out}/hf (Hugging Face), {cfg.out}/metrics.jsonl, {cfg.out}/loss.png", flush=True)


def first_state(cfg: Train, setup: Setup, mesh: Mesh, ranks: Ranks, home: Arena | None) -> State:
    """The checkpoint's weights and an optimizer that has done nothing."""
    read = partial(models.from_hf, cfg.model, table=setup.table, mesh=mesh, dtype=torch.float32)
    _, params = ranks.checked(lambda: read(device=ranks.device))
    return State(params, adamw_init(params, arena=home))


def finished(cfg: Train, state: State) -> bool:
    return cfg.resume and state.step >= cfg.steps and (cfg.out / "hf").exists()


def start_folder(cfg: Train, setup: Setup, known: facts.Facts) -> None:
    facts.write_facts(cfg, known)
    if (cfg.out / "hf").exists():  # an export of fewer steps: gone at once, so that no half of it is left
        os.rename(cfg.out / "hf", cfg.out / f".hf.{os.getpid()}.tmp")
    for left in cfg.out.glob(".hf.*.tmp"):  # also of a process that was killed
        shutil.rmtree(left, ignore_errors=True)
    data = setup.data
    print(
        f"{len(data.docs)} documents, {data.num_tokens} tokens: {data.rows_per_epoch} rows of {cfg.seq_len} "
        f"an epoch; {setup.num_rows} rows a step",
        flush=True,
    )


def read_options(prog: str, args: Sequence[str] | None) -> tuple[Train | None, SystemExit | None]:
    """The options, before there is anyone to tell of an error in them: the wait for others is one of them."""
    try:
        cfg: Train = parse(Train, prog=prog, args=args)
    except SystemExit as e:
        return None, e
    restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0
    return (dataclasses.replace(cfg, resume=True) if restarted else cfg), None


def main(args: Sequence[str] | None = None, *, prog: str = "python -m usp.tools.train") -> None:
    cfg, refused = read_options(prog, args)
    with Stop() as stop:
        on_ranks(cfg, refused, partial(train, stop=stop))


if __name__ == "__main__":
    main()
