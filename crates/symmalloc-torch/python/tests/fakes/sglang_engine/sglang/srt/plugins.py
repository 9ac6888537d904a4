def load_plugins():
    print("plug-ins")
