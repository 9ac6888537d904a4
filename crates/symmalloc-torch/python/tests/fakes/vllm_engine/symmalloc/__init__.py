"""The package, as a worker of a job sees it. An engine imports it where symmalloc is installed."""


def installed():
    return True
