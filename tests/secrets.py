"""Every text that a private key may be found as."""

import base64

from sandboxes import curves
from sandboxes.curves import CURVES, Private


def texts(private: Private) -> set[str]:
    raw = private.secret
    multibase = curves.base58(CURVES[private.algorithm].private + raw)
    encoded = {base64.b64encode(raw), base64.urlsafe_b64encode(raw)}
    # Whatever stands before it, two of these are in the base64 of something that contains it.
    encoded |= {base64.b64encode(b"\0" * pad + raw)[4:-4] for pad in (1, 2)}
    return {
        raw.hex(), raw.hex().upper(), str(int.from_bytes(raw)), multibase, curves.base58(raw), repr(raw)[2:-1],
        *(text.decode().rstrip("=") for text in encoded),
    }  # fmt: skip
