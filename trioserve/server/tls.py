"""The server's certificate, and a new one when its files change."""

from __future__ import annotations

import logging
import os
import ssl

import attrs

from trioserve.errors import InvalidConfigError
from trioserve.server_args import ServerArgs

__all__ = ["Certificates"]

log = logging.getLogger("trioserve.tls")

_FIELDS = ("ssl_certfile", "ssl_keyfile", "ssl_ca_certs")

# Of each file: when it was changed, its size and its number, which a renamed file brings along.
_Stamp = tuple[tuple[int, int, int] | None, ...]


@attrs.define(eq=False)
class Certificates:
    """TLS settings for new connections; open ones keep what they began with.

    The files are looked at whenever a connection comes in, not by a task of their own: a few `stat` calls
    are nothing beside a handshake, there is nothing to start and stop, and no client is ever answered with a
    certificate that had been replaced when it came.
    """

    _args: ServerArgs
    _context: ssl.SSLContext
    _stamp: _Stamp

    @classmethod
    def from_args(cls, args: ServerArgs) -> Certificates | None:
        """None where TLS is not wanted.

        Raises:
          InvalidConfigError: a file is missing, unreadable, not what it should be, or does not match.
        """
        if args.ssl_certfile is None:
            return None
        stamp = _stamp(args)
        return cls(args, _load(args), stamp)

    def current(self) -> ssl.SSLContext:
        """For a new connection. Reads files that have changed; never raises because of them.

        Changed files that cannot be used, such as a new certificate before its key, are logged once, and
        the certificate before them stays.
        """
        if self._args.enable_ssl_refresh and (stamp := _stamp(self._args)) != self._stamp:
            self._stamp = stamp
            try:
                self._context = _load(self._args)
                log.info("the TLS certificate has been replaced")
            except (InvalidConfigError, OSError) as error:  # OSError: one is taken away while it is read
                log.warning("the changed TLS files are not taken over: %s", error)
        return self._context


def _stamp(args: ServerArgs) -> _Stamp:
    return tuple(_stamp_of(getattr(args, field)) for field in _FIELDS)


def _stamp_of(path: str | None) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path) if path is not None else None
    except OSError:
        return None
    return found and (found.st_mtime_ns, found.st_size, found.st_ino)


def _load(args: ServerArgs) -> ssl.SSLContext:
    for field in _FIELDS:
        _refuse_unreadable(field, getattr(args, field))
    _refuse_without_certificate("ssl_certfile", args.ssl_certfile)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(["h2", "http/1.1"] if args.http2 else ["http/1.1"])
    _load_chain(context, args)
    if args.ssl_ca_certs is not None:
        _refuse_without_certificate("ssl_ca_certs", args.ssl_ca_certs)
        context.load_verify_locations(args.ssl_ca_certs)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _load_chain(context: ssl.SSLContext, args: ServerArgs) -> None:
    assert args.ssl_certfile is not None
    field = "ssl_certfile" if args.ssl_keyfile is None else "ssl_keyfile"
    path = getattr(args, field)
    try:
        # OpenSSL would ask for a password on the terminal.
        context.load_cert_chain(args.ssl_certfile, args.ssl_keyfile, password=lambda: "")
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            problem = f"holds a key that does not belong to ssl_certfile {args.ssl_certfile!r}"
        else:
            problem = "must hold a private key in PEM, without a password"
        raise InvalidConfigError(f"{field} {path!r} {problem}.", field=field) from error


def _refuse_unreadable(field: str, path: str | None) -> None:
    if path is None:
        return
    try:
        with open(path, "rb"):
            pass
    except OSError as error:
        raise InvalidConfigError(
            f"{field} {path!r} cannot be read: {error.strerror}.", field=field
        ) from error


def _refuse_without_certificate(field: str, path: str | None) -> None:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(path)
    except ssl.SSLError as error:
        raise InvalidConfigError(f"{field} {path!r} must hold certificates in PEM.", field=field) from error
