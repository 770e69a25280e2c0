# role: setup
# ends: ok
answer = 5
