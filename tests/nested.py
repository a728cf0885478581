"""Equality of what environments return: nested results, bit for bit."""

import numpy as np


def assert_same(a, b, where="", bits=True):
    """The same types, dtypes, shapes and (with NaN equal to NaN) every bit; else say where not.

    With ``bits=False`` a minus zero equals a zero.
    """
    assert type(a) is type(b), f"{where}: {type(a)} is not {type(b)}"
    if isinstance(a, dict):
        assert a.keys() == b.keys(), f"{where}: {sorted(a)} are not {sorted(b)}"
        for key in a:
            assert_same(a[key], b[key], f"{where}[{key!r}]", bits)
    elif isinstance(a, (tuple, list)):
        assert len(a) == len(b), where
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same(x, y, f"{where}[{i}]", bits)
    elif isinstance(a, np.ndarray):
        assert a.dtype == b.dtype, f"{where}: {a.dtype} is not {b.dtype}"
        assert a.shape == b.shape, f"{where}: {a.shape} is not {b.shape}"
        if a.dtype == object:
            assert_same(a.tolist(), b.tolist(), where, bits)
        elif a.tobytes() == b.tobytes():
            return
        elif a.dtype.names is None:
            np.testing.assert_array_equal(a, b, err_msg=where)
            if bits and a.dtype.kind == "f":
                np.testing.assert_array_equal(np.signbit(a), np.signbit(b), err_msg=where)
        else:
            for name in a.dtype.names:
                assert_same(a[name], b[name], f"{where}.{name}", bits)
    elif isinstance(a, float) and a != a:
        assert b != b, f"{where}: {a} is not {b}"
    else:
        assert a == b, f"{where}: {a} is not {b}"


def same(a, b):
    """Whether `assert_same` holds."""
    try:
        assert_same(a, b)
    except AssertionError:
        return False
    return True
