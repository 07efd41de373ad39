"""Trains a small GPT on many devices: data, fully sharded and tensor parallel, or all at once.

The text is the manual that ships with every CPython, one character at a time. Computed in
bfloat16 with float32 parameters; each call splits its batch into micro-batches, and several
calls make one optimizer step. Eight virtual devices on any machine:

    XLA_FLAGS=--xla_force_host_platform_device_count=8 \\
        python examples/sharded_transformer.py --data 4 --model 2 --fsdp

On several hosts run the same command on each, with --coordinator, --num-processes and
--process-id, or under a scheduler that JAX knows (SLURM, Open MPI) without them. A checkpoint
may be taken in the middle of a window, and resumed on another mesh.
"""

import argparse
import functools
import json
import math
import os
import time
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import linen as nn
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import gradclip_jax as gcx


def read_text() -> tuple[np.ndarray, int]:
    """The characters as int32[characters], and how many different ones there are."""
    text = "\n\n".join(topics[name] for name in sorted(topics))
    index = {character: i for i, character in enumerate(sorted(set(text)))}
    return np.array([index[character] for character in text], np.int32), len(index)


class Block(nn.Module):
    heads: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        width = x.shape[-1]
        dense = functools.partial(nn.DenseGeneral, use_bias=False, dtype=jnp.bfloat16)
        norm = functools.partial(nn.LayerNorm, use_bias=False, dtype=jnp.bfloat16)
        qkv = dense((self.heads, 3 * width // self.heads), name="qkv")(norm()(x))
        mixed = jax.nn.dot_product_attention(*jnp.split(qkv, 3, axis=-1), is_causal=True)
        x += dense(width, axis=(-2, -1), name="out")(mixed)
        return x + dense(width, name="down")(nn.gelu(dense(4 * width, name="up")(norm()(x))))


class GPT(nn.Module):
    vocabulary: int
    layers: int
    heads: int
    width: int
    mesh: Mesh

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        def place(x: jax.Array) -> jax.Array:
            return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, P("data")))

        x = nn.Embed(self.vocabulary, self.width, dtype=jnp.bfloat16)(tokens)
        x += nn.Embed(tokens.shape[-1], self.width, dtype=jnp.bfloat16)(np.arange(tokens.shape[-1]))
        for _ in range(self.layers):
            x = Block(self.heads)(place(x))
        x = nn.LayerNorm(use_bias=False, dtype=jnp.bfloat16)(place(x))
        return nn.Dense(self.vocabulary, dtype=jnp.bfloat16)(x).astype(jnp.float32)


SPLIT_OVER_MODEL = {"qkv": 1, "out": 0, "up": 1, "down": 0}  # axis of the kernel, by layer


def placed(shapes: Any, mesh: Mesh, fsdp: bool) -> Any:
    """The shapes of parameters or optimizer state, each with its place on the mesh.

    Moments and accumulators end in the path of their parameter, so one rule serves them all.
    """

    def place(path: Any, x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        axes: list[str | None] = [None] * x.ndim
        layer = getattr(path[-2], "key", None)
        if layer in SPLIT_OVER_MODEL:
            axes[SPLIT_OVER_MODEL[layer]] = "model"
        free = [i for i, n in enumerate(x.shape) if not axes[i] and n % mesh.shape["data"] == 0]
        if fsdp and free:
            axes[max(free, key=lambda i: x.shape[i])] = "data"
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, P(*axes)))

    return jax.tree_util.tree_map_with_path(place, shapes)


def draw_batch(tokens: np.ndarray, step: int, args: argparse.Namespace, mesh: Mesh) -> jax.Array:
    """Random stretches of the text, int32[batch, length + 1]; a function of seed and step alone.

    Every process draws them all and hands out those of its own devices.
    """
    random = np.random.default_rng([args.seed, step])
    starts = random.integers(0, len(tokens) - args.length - 1, (args.batch_size, 1))
    batch = tokens[starts + np.arange(args.length + 1)]
    where = NamedSharding(mesh, P("data"))
    return jax.make_array_from_callback(batch.shape, where, lambda index: batch[index])


def make_optimizer(args: argparse.Namespace) -> optax.GradientTransformation:
    warmup = optax.linear_schedule(0.0, args.learning_rate, 20)
    tx = optax.chain(gcx.clip_by_global_norm(args.max_norm), optax.adamw(warmup))
    if args.accumulation == "gcx":
        tx = gcx.accumulate_gradients(tx, args.every)
        return gcx.skip_nonfinite(tx, max_consecutive_skips=10) if args.guard else tx
    tx = optax.MultiSteps(tx, args.every).gradient_transformation()
    return optax.apply_if_finite(tx, max_consecutive_errors=10) if args.guard else tx


def make_run(args: argparse.Namespace, mesh: Mesh, vocabulary: int) -> tuple[Any, Any, Any]:
    """The compiled step, the run it takes and returns, and what the run looks like."""
    model = GPT(vocabulary, args.layers, args.heads, args.width, mesh)
    tx = make_optimizer(args)

    def init(key: jax.Array) -> dict[str, Any]:
        params = model.init(key, jnp.zeros((args.batch_size, args.length), jnp.int32))
        return {"params": params, "state": tx.init(params)}

    def loss_fn(params: Any, tokens: jax.Array) -> jax.Array:
        logits = model.apply(params, tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    value_and_grad = gcx.microbatched_value_and_grad(loss_fn, args.micro_batches)

    def step(run: dict[str, Any], tokens: jax.Array) -> tuple[dict[str, Any], dict[str, Any]]:
        params, state = run["params"], run["state"]
        loss, grads = value_and_grad(params, tokens)
        params, state = gcx.apply_gradients(tx, grads, state, params, value=loss)
        return {"params": params, "state": state}, {"loss": loss, **gcx.metrics(state)}

    key = jax.random.key(args.seed)
    like = placed(jax.eval_shape(init, key), mesh, args.fsdp)
    places = jax.tree.map(lambda x: x.sharding, like)
    # Donated: parameters and state are updated in the buffers they came in.
    step = jax.jit(step, donate_argnums=0, out_shardings=(places, None))
    return step, jax.jit(init, out_shardings=places)(key), like


def open_checkpoints(folder: Path) -> ocp.CheckpointManager:
    if jax.__version_info__ < (0, 8):  # replicas would share the writing, by what JAX 0.7 lacks
        handler = ocp.type_handlers.ArrayHandler(use_replica_parallel=False)
        ocp.type_handlers.register_type_handler(jax.Array, handler, override=True)
    options = ocp.CheckpointManagerOptions(max_to_keep=2)
    return ocp.CheckpointManager(folder.absolute(), options=options)


def restore(manager: ocp.CheckpointManager, like: Any) -> tuple[int, Any]:
    """The latest checkpoint, whatever mesh it was made on."""
    if (first := manager.latest_step()) is None:
        raise SystemExit(f"--resume: no checkpoint in {manager.directory}. Leave it out.")
    try:
        return first, manager.restore(first, args=ocp.args.StandardRestore(like))
    except (KeyError, TypeError, ValueError) as problem:
        hint = "Use the sizes, the accumulation and the guard that it was made with."
        raise SystemExit(f"--resume: the checkpoint does not fit. {hint}\n{problem}") from None


def train(args: argparse.Namespace, mesh: Mesh) -> dict[str, Any]:
    tokens, vocabulary = read_text()
    step, run, like = make_run(args, mesh, vocabulary)
    manager = open_checkpoints(args.checkpoint_dir) if args.checkpoint_dir else None
    first, run = restore(manager, like) if args.resume else (0, run)
    size = sum(leaf.size for leaf in jax.tree.leaves(run["params"]))
    say(
        f"{size:,} parameters, {vocabulary} characters, mesh {dict(mesh.shape)}"
        f"{', fully sharded' if args.fsdp else ''}, {jax.process_count()} process(es) of "
        f"{jax.local_device_count()} x {jax.devices()[0].device_kind}; from call {first}"
    )
    losses, found, start = [], {}, math.nan
    for call in range(first + 1, args.steps + 1):
        run, found = step(run, draw_batch(tokens, call, args, mesh))
        losses.append(found["loss"])
        if call == first + 1:  # it compiled
            jax.block_until_ready(found)
            start = time.perf_counter()
        if call % args.log_every == 0 or call == args.steps:
            say(f"call {call}/{args.steps}  {report(found)}")
            if found.get("guard_failed", False):
                raise SystemExit("Ten calls in a row were not finite. Lower --learning-rate.")
        if manager and (call % args.checkpoint_every == 0 or call == args.steps):
            manager.save(call, args=ocp.args.StandardSave(run))
    jax.block_until_ready(run)
    seconds = time.perf_counter() - start
    if manager:
        manager.close()  # waits until all is written
    speed = (len(losses) - 1) * args.batch_size * args.length / seconds
    say(f"{speed:,.0f} tokens per second" if len(losses) > 1 else "too few calls to time")
    return {
        "first_call": first,
        "losses": [float(loss) for loss in losses],
        "metrics": {name: float(value) for name, value in found.items()},
        "tokens_per_second": speed if len(losses) > 1 else None,
    }


def report(found: dict[str, jax.Array]) -> str:
    bits = float(found["loss"]) / math.log(2)
    names = ("grad_norm", "clip_factor", "gradient_step", "mini_step", "skipped_nonfinite")
    told = "  ".join(f"{name} {float(found[name]):.4g}" for name in names if name in found)
    return f"{bits:.3f} bits per character  {told}"


def say(line: str) -> None:
    if jax.process_index() == 0:
        print(line, flush=True)


def positive(kind: type) -> Any:
    """A parser of numbers > 0 that says what was wrong."""

    def parse(word: str) -> Any:
        try:
            if 0 < (value := kind(word)) < math.inf:
                return value
        except ValueError:
            pass
        rule = "an integer >= 1" if kind is int else "a finite number > 0"
        raise argparse.ArgumentTypeError(f"must be {rule}, got {word!r}")

    return parse


def read_arguments(words: list[str] | None) -> tuple[argparse.Namespace, Mesh]:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("sharded_transformer.py", None, __doc__, formatter_class=raw)
    count, number, add = positive(int), positive(float), parser.add_argument
    add("--data", type=count, metavar="N", help="mesh axis of the batch (default: what is left)")
    add("--model", type=count, default=1, metavar="N", help="mesh axis of tensor parallelism (1)")
    add("--fsdp", action="store_true", help="shard parameters and state over the data axis, too")
    add("--steps", type=count, default=400, metavar="N", help="calls in all (400)")
    add("--every", type=count, default=4, metavar="K", help="calls for one optimizer step (4)")
    add("--micro-batches", type=count, default=2, metavar="M", help="in one call (2)")
    add("--batch-size", type=count, default=32, metavar="B", help="stretches in one call (32)")
    add("--length", type=count, default=128, metavar="T", help="characters in a stretch (128)")
    add("--layers", type=count, default=4, metavar="L", help="transformer blocks (4)")
    add("--width", type=count, default=128, metavar="D", help="of the residual stream (128)")
    add("--heads", type=count, default=4, metavar="H", help="of the attention (4)")
    add("--learning-rate", type=number, default=1e-3, metavar="X", help="of AdamW (0.001)")
    add("--max-norm", type=number, default=1.0, metavar="X", help="of the clipping (1.0)")
    whose = "gcx.accumulate_gradients or, to compare, optax.MultiSteps (gcx)"
    add("--accumulation", choices=("gcx", "multisteps"), default="gcx", help=whose)
    add("--no-guard", dest="guard", action="store_false", help="take steps that are not finite")
    add("--seed", type=count, default=1, metavar="S", help="of the parameters and the data (1)")
    add("--log-every", type=count, default=20, metavar="N", help="calls (20)")
    add("--checkpoint-dir", type=Path, metavar="DIR", help="one that all processes can see")
    add("--checkpoint-every", type=count, default=100, metavar="N", help="calls (100)")
    add("--resume", action="store_true", help="from the latest checkpoint, on any mesh")
    add("--summary", type=Path, metavar="FILE", help="losses and tokens per second as JSON")
    add("--coordinator", metavar="HOST:PORT", help="of process 0, for several processes")
    add("--num-processes", type=count, metavar="N", help="with --coordinator")
    add("--process-id", type=int, metavar="I", help="with --coordinator, from 0")
    args = parser.parse_args(words)
    if args.resume and not args.checkpoint_dir:
        parser.error("argument --resume: needs --checkpoint-dir")
    if args.resume and not args.checkpoint_dir.is_dir():
        parser.error(f"argument --resume: there is no folder {args.checkpoint_dir}")
    join_processes(args)
    devices = jax.devices()
    args.data = args.data or max(len(devices) // args.model, 1)
    used, parts = args.data * args.model, args.micro_batches * args.data
    if used > len(devices) or (used < len(devices) and jax.process_count() > 1):
        parser.error(f"argument --data: --data x --model is {used}, the devices are {len(devices)}")
    for name, whole, what, of in (
        ("--width", args.width, "--heads", args.heads),
        ("--heads", args.heads, "--model", args.model),
        ("--batch-size", args.batch_size, "--micro-batches x --data", parts),
    ):
        if whole % of:
            parser.error(f"argument {name}: must be a multiple of {what}, got {whole} and {of}")
    shape, kinds = (args.data, args.model), (AxisType.Auto,) * 2
    return args, jax.make_mesh(shape, ("data", "model"), axis_types=kinds, devices=devices[:used])


def join_processes(args: argparse.Namespace) -> None:
    """Makes one run of several processes, if there are several."""
    tasks = (os.environ.get(name, "1") for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"))
    is_told = args.coordinator or "JAX_COORDINATOR_ADDRESS" in os.environ
    if is_told or any(task != "1" for task in tasks):
        jax.distributed.initialize(args.coordinator, args.num_processes, args.process_id)


def main(words: list[str] | None = None) -> None:
    args, mesh = read_arguments(words)
    found = train(args, mesh)
    if args.summary and jax.process_index() == 0:
        args.summary.write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
