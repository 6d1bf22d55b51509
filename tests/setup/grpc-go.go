// A client of grpc-go, which kubelet and the sidecars are, too: makes a call several times at once on one connection, writes the
// answer to its standard output, or says what it was refused with.
//
//	client SOCKET METHOD NAME
//
// NAME is what it calls the server: "path" leaves it to grpc-go, which is given the path of the socket as kubelet gives it;
// "escaped" is what newer ones of grpc-go make of that; anything else is said as it is.
package main

import (
	"context"
	"fmt"
	"net"
	"net/url"
	"os"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/status"
)

const calls = 8

// bare leaves messages as they are.
type bare struct{}

func (bare) Marshal(message interface{}) ([]byte, error) { return *message.(*[]byte), nil }

func (bare) Unmarshal(data []byte, message interface{}) error {
	*message.(*[]byte) = append([]byte(nil), data...)
	return nil
}

func (bare) Name() string { return "proto" }

func main() {
	socket, method, name := os.Args[1], os.Args[2], os.Args[3]
	options := []grpc.DialOption{
		grpc.WithInsecure(),
		grpc.WithBlock(),
		grpc.WithContextDialer(func(ctx context.Context, target string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", target)
		}),
	}
	switch name {
	case "path":
	case "escaped":
		options = append(options, grpc.WithAuthority(url.PathEscape(socket)))
	default:
		options = append(options, grpc.WithAuthority(name))
	}
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	connection, err := grpc.DialContext(ctx, socket, options...)
	if err != nil {
		fail(err)
	}
	answers, errors := make(chan []byte, calls), make(chan error, calls)
	for i := 0; i < calls; i++ {
		go func() {
			request, answer := []byte{}, []byte(nil)
			errors <- connection.Invoke(ctx, method, &request, &answer, grpc.ForceCodec(bare{}))
			answers <- answer
		}()
	}
	var answer []byte
	for i := 0; i < calls; i++ {
		if err := <-errors; err != nil {
			fail(err)
		}
		answer = <-answers
	}
	os.Stdout.Write(answer)
}

func fail(err error) {
	told, _ := status.FromError(err)
	fmt.Fprintf(os.Stderr, "%s: %s\n", told.Code(), told.Message())
	os.Exit(1)
}
