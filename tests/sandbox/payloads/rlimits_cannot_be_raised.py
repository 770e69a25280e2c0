# role: program
# ends: ok
import resource

for kind in (resource.RLIMIT_AS, resource.RLIMIT_NPROC, resource.RLIMIT_FSIZE, resource.RLIMIT_CPU):
    try:
        resource.setrlimit(kind, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        print("ESCAPED", kind)
    except (ValueError, PermissionError):
        print("held")
