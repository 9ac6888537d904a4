def kill_process_tree(parent_pid, include_parent):
    print("ended", include_parent)
