"""Gradient clipping methods without wide adoption or without a benefit in our study.

| function | method |
| --- | --- |
| `acclip` | clip each element by a moving average of its magnitude |
| `spam_clip` | clip elements whose square exceeds a multiple of the second moment |
| `stable_spam_clip` | clip and normalize each leaf by moving averages of its magnitude and norm |
| `stable_adamw` | AdamW whose learning rate is divided by the RMS of the update of each leaf |
| `u_clip` | clip, and add the clipped-off part of the gradient to the next gradient |

The API of `gradclip_jax.contrib` may change in any release.
"""

from ._moments import acclip, spam_clip, stable_adamw
from ._stable_spam_clip import stable_spam_clip
from ._u_clip import u_clip

__all__ = ["acclip", "spam_clip", "stable_adamw", "stable_spam_clip", "u_clip"]
