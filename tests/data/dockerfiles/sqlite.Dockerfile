# check: python3 -c "import sqlite3; assert sqlite3.connect('a.db').execute('select n from t').fetchone() == (7,)"
# needs: run
FROM debian
WORKDIR /data
RUN python3 -c "import sqlite3; c = sqlite3.connect('a.db'); c.execute('create table t (n int)'); \
    c.execute('insert into t values (7)'); c.commit()"
