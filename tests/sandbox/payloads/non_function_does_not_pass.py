# role: candidate
# ends: ok killed
answer = [[1, 2], {"a": 1}]
