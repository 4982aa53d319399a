collect_ignore = ["startup"]  # for other processes: imported here, it would define operators twice
