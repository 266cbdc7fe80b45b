# check: test "$(cat /srv/site/list /srv/site/three | tr '\n' ' ')" = 'one two $HOME'
# needs: run
FROM debian
RUN <<END
set -e
mkdir -p /srv/site
printf '%s\n' one two > /srv/site/list
END
RUN <<-"PY" python3 -
	open("/srv/site/three", "w").write("$HOME")
	PY
