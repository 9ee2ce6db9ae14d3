"""From the key in a graph node to the live bucket.

A custom op takes strings and ints, not objects, so ``gather_param`` names its bucket by key, as c10d ops name a process
group. Buckets are held weakly: an entry goes when its model does.
"""

from __future__ import annotations

import hashlib
import itertools
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fxshard.bucket import ParamBucket

_buckets: weakref.WeakValueDictionary[str, ParamBucket] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def register(bucket: ParamBucket, facts: object) -> str:
    """Keep ``bucket`` (weakly) and return its key, unique in this process.

    The key ends in a digest of ``facts`` (by their ``repr``): all that the shapes and dtypes of the bucket's ops depend
    on. Compilers cache code on disk by the text of graphs, and must not serve code that was made for another layout.
    """
    key = f"b{next(_numbers)}-{hashlib.sha256(repr(facts).encode()).hexdigest()[:12]}"
    _buckets[key] = bucket
    return key


def lookup(key: str) -> ParamBucket:
    """The bucket of a key. ``RuntimeError`` when its model is gone."""
    bucket = _buckets.get(key)
    if bucket is None:
        raise RuntimeError(f"no live bucket {key!r}: the sharded model that this graph was captured from was deleted")
    return bucket
