# role: candidate
# ends: ok killed
raise SystemExit(0)
