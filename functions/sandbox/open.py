"""Which sandbox: this machine's, or a service's."""

from functions.sandbox.program import Sandbox


def open_sandbox(url: str | None) -> Sandbox:
    """None: this machine's. Raises SandboxError where it does not allow one."""
    if url is not None:
        from functions.sandbox.remote import RemoteSandbox

        return RemoteSandbox(url)
    from functions.sandbox.local import LocalSandbox

    return LocalSandbox()
