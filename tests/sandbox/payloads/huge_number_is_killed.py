# role: program
# ends: timeout memory
x = 9**9**9
