def launch_server(server_args, run_scheduler_process_func=None):
    print(server_args.model, run_scheduler_process_func.__module__, run_scheduler_process_func.__name__)
