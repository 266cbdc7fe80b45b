from pkg import VALUE

print(VALUE)
