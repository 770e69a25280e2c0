# role: parametrized
# ends: ok
raise ValueError("not today")
