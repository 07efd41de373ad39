"""The lines of the text logs of several trainers."""

import math

import pytest

from gradclip_jax.monitoring._log import read_rows


@pytest.mark.parametrize(
    ("line", "step", "loss", "norm"),
    [
        ("{'loss': 2.5, 'grad_norm': nan, 'learning_rate': 1e-05, 'epoch': 0.1}", 0, 2.5, math.nan),
        (
            " iteration   100/  9000 | lm loss: 6.75E+00 | loss scale: 65536.0 | grad norm: 1.5 |",
            100,
            6.75,
            1.5,
        ),
        ("step:25/6200 train_loss:3.25 train_time:100ms step_avg:10ms", 25, 3.25, None),
        ("completed step: 10, seconds: 0.5, TFLOP/s/device: 5.1, loss: 10.125", 10, 10.125, None),
        ("[12:00:00] INFO step=17 train/loss=2.5 train/grad_norm=.75 lr=1e-4", 17, 2.5, 0.75),
        ("iter 0: loss 10.5, time 69000ms, mfu -100.00%", 0, 10.5, None),
        ("gnorm 1.5 | aux_loss 0.1 | loss inf | global_step 9", 9, math.inf, 1.5),
        ("step 250: train loss 4.5, val loss 4.75", 250, 4.5, None),
    ],
)
def test_a_line_of_text_has_a_step_a_loss_and_a_norm(line, step, loss, norm, tmp_path):
    path = tmp_path / "train.log"
    others = ["Loading the weights", "step 5 val_loss 1.0", "val loss: 2.0", "no loss of 3 files"]
    path.write_text("\n".join([others[0], line, *others[1:]]))
    rows, names = read_rows(path)
    assert names == ((), (), ())
    assert rows.step.tolist() == [step]
    assert rows.loss == pytest.approx([loss], nan_ok=True)
    assert rows.norms[:, 0, 0] == pytest.approx([norm or 0.0], nan_ok=True)


def test_a_csv_file_may_have_spaces_and_lines_of_other_lengths(tmp_path):
    path = tmp_path / "progress.csv"
    path.write_text("step, train/loss, train/grad_norm\n1, 2.5, 1.5\n2, 2.25\n3, 2, 1, 0\n")
    rows, _ = read_rows(path)
    assert rows.step.tolist() == [1, 2, 3] and rows.loss.tolist() == [2.5, 2.25, 2]
    assert rows.norms[:, 0, 0].tolist() == [1.5, 0, 1]
