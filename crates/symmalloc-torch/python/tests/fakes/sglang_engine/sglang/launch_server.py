from types import SimpleNamespace


def prepare_server_args(arguments):
    return SimpleNamespace(model=arguments[0], use_ray="--use-ray" in arguments)


def run_server(server_args):
    from sglang.srt.entrypoints.http_server import launch_server

    launch_server(server_args)
