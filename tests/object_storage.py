"""A server of S3 in this process, by moto. Tests that use it are skipped without s3fs or moto."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest


@contextmanager
def bucket(monkeypatch: pytest.MonkeyPatch, name: str) -> Iterator[Any]:
    """Yield boto3's client of a server with the bucket, which the environment names to all clients."""
    pytest.importorskip("s3fs")
    server = pytest.importorskip("moto.server").ThreadedMotoServer(port=0, verbose=False)
    boto3 = pytest.importorskip("boto3")
    server.start()
    host, port = server.get_host_and_port()
    values = {"ACCESS_KEY_ID": "test", "SECRET_ACCESS_KEY": "test", "DEFAULT_REGION": "eu-north-1"}
    for key, value in (values | {"ENDPOINT_URL": f"http://{host}:{port}"}).items():
        monkeypatch.setenv(f"AWS_{key}", value)
    try:
        client = boto3.client("s3")
        place = {"LocationConstraint": "eu-north-1"}
        client.create_bucket(Bucket=name, CreateBucketConfiguration=place)
        yield client
    finally:
        server.stop()
