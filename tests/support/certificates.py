"""Certificates, and keys of NATS, for servers that want to know who asks."""

from __future__ import annotations

import base64
import hashlib
import json
from pathlib import Path
from typing import Any

import nkeys
import trustme

__all__ = ["Authority", "NatsOperator"]


class Authority:
    """Signs certificates of servers and clients, as files in PEM.

    Attributes:
        ca: The authority's own certificate.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._ca = folder, trustme.CA()
        self.ca = str(folder / "ca.pem")
        self._ca.cert_pem.write_to_path(self.ca)

    def pair(self, name: str) -> tuple[str, str]:
        """A certificate for this host or client, and its key."""
        made = self._ca.issue_cert(name)
        cert, key = self._folder / f"{name}.pem", self._folder / f"{name}.key"
        made.cert_chain_pems[0].write_to_path(cert)
        made.private_key_pem.write_to_path(key)
        return str(cert), str(key)

    def own(self) -> tuple[str, str]:
        """Its own certificate, and its key: no server should show them."""
        key = self._folder / "ca.key"
        self._ca.private_key_pem.write_to_path(key)
        return self.ca, str(key)


class NatsOperator:
    """An operator with two accounts, and users with tokens that the server has never seen."""

    def __init__(self) -> None:
        self._key = _pair("operator", nkeys.PREFIX_BYTE_OPERATOR)
        self._accounts = {
            name: _pair(name, nkeys.PREFIX_BYTE_ACCOUNT) for name in ("system", "app")
        }

    def config(self) -> str:
        """Certificates and keys that the server needs."""
        everything = dict.fromkeys(
            ("subs", "data", "payload", "imports", "exports", "conn", "leaf", "disk_storage",
             "mem_storage", "streams", "consumer"), -1
        )  # fmt: skip
        system, app = (_name(self._accounts[name]) for name in ("system", "app"))
        tokens = {
            # The server's own account must not store anything.
            system: self._token(self._key, system, {"type": "account", "limits": {
                **everything, "disk_storage": 0, "mem_storage": 0, "wildcards": True}}),
            app: self._token(self._key, app, {"type": "account", "limits": {
                **everything, "wildcards": True}}),
        }  # fmt: skip
        preload = "\n".join(f"{account}: {token}" for account, token in tokens.items())
        operator = self._token(self._key, _name(self._key), {"type": "operator"})
        return (
            f"operator: {operator}\nsystem_account: {system}\nresolver: MEMORY\n"
            f"resolver_preload: {{\n{preload}\n}}\n"
        )

    def credentials(self, user: str) -> str:
        """A user's credentials file."""
        key = _pair(user, nkeys.PREFIX_BYTE_USER)
        limits = {"subs": -1, "data": -1, "payload": -1}
        token = self._token(self._accounts["app"], _name(key), {"type": "user", **limits})
        return (
            f"-----BEGIN NATS USER JWT-----\n{token}\n------END NATS USER JWT------\n\n"
            f"-----BEGIN USER NKEY SEED-----\n{key.seed.decode()}\n------END USER NKEY SEED------\n"
        )

    @staticmethod
    def _token(issuer: Any, subject: str, nats: dict[str, Any]) -> str:
        claims = {"iss": _name(issuer), "sub": subject, "name": subject, "iat": 1_700_000_000}
        claims["jti"] = hashlib.sha256(json.dumps([claims, nats]).encode()).hexdigest()
        parts = [{"typ": "JWT", "alg": "ed25519-nkey"}, {**claims, "nats": {**nats, "version": 2}}]
        text = ".".join(_packed(json.dumps(part).encode()) for part in parts)
        return f"{text}.{_packed(issuer.sign(text.encode()))}"


def _pair(name: str, prefix: int) -> Any:
    return nkeys.from_seed(nkeys.encode_seed(hashlib.sha256(name.encode()).digest(), prefix))


def _name(key: Any) -> str:
    return str(key.public_key.decode())


def _packed(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")
